"""Configuration: every field can be set, every mistake is one line that names what to mend."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from pdjax.config.load import DEFAULT_FILE, ConfigError, describe_fields, dump_config, load_config
from pdjax.config.schema import Config

FIELDS = {field.name: field for field in describe_fields()}

# Another valid value for each field whose type alone does not give one, or whose neighbours limit it.
CHOSEN: dict[str, tuple[str, Any]] = {
    "worker.router": ("10.0.0.5:9001", "10.0.0.5:9001"),
    "worker.heartbeat_interval_s": ("0.25", 0.25),
    "engine.max_running": ("8", 8),
    "engine.prefill_buckets": ("[64, 512]", (64, 512)),
    "engine.decode_buckets": ("[4, 32]", (4, 32)),
    "engine.transfer_buckets": ("[2, 8]", (2, 8)),
    "decode.device": ("3", 3),
    "scheduler.max_step_tokens": ("128", 128),
    "scheduler.metadata_slots": ("7", 7),
    "transfer.emulate_gbytes_per_s": ("0.5", 0.5),
    "worker.num_chips": ("4", 4),
    "worker.coordinator": ("host:8476", "host:8476"),
    "decode.device": ("3", 3),
    "transfer.emulate_announce_delay_s": ("0.5", 0.5),
}


def other_value(name: str) -> tuple[str, Any]:
    """A value for a field as the user writes it and as Python has it, different from the default."""
    if name in CHOSEN:
        return CHOSEN[name]
    field = FIELDS[name]
    default = yaml.safe_load(field.default)
    kind = field.type.split()[0]
    if kind == "int":
        return str(default + 1), default + 1
    if kind == "float":
        return f"{default * 2:g}", default * 2
    if kind == "bool":
        return ("false", False) if default else ("true", True)
    if kind == "text":
        return "somewhere else", "somewhere else"
    option = next(option for option in field.type.split(" or ") if option != default)
    return option, option


def value_of(config: Config, name: str) -> Any:
    section, _, field = name.partition(".")
    return config.model_dump()[section][field]


def problems_of(*overrides: str, path: Path | None = None) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load_config(path, overrides)
    assert str(caught.value) == "\n".join(caught.value.problems)
    return list(caught.value.problems)


def written(folder: Path, text: str) -> Path:
    file = folder / "system.yaml"
    file.write_text(text)
    return file


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_can_be_set_by_a_word_and_changes_nothing_else(name: str) -> None:
    text, expected = other_value(name)
    config = load_config(None, [f"{name}={text}"])
    assert value_of(config, name) == expected != value_of(Config(), name)
    others = {field: value_of(config, field) for field in FIELDS if field != name}
    assert others == {field: value_of(Config(), field) for field in FIELDS if field != name}


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_can_be_set_in_a_file(name: str, tmp_path: Path) -> None:
    text, expected = other_value(name)
    section, _, field = name.partition(".")
    assert value_of(load_config(written(tmp_path, f"{section}:\n  {field}: {text}\n")), name) == expected


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_refuses_a_mapping_and_says_which_field_it_was(name: str) -> None:
    [problem] = problems_of(f"{name}={{a: 1}}")
    assert problem.startswith(f"command line: {name} must be ")
    assert problem.endswith('got {"a": 1}')


@pytest.mark.parametrize("name", FIELDS)
def test_every_field_is_described(name: str) -> None:
    assert len(FIELDS[name].description) > 10 or name == "server.max_choices"
    assert FIELDS[name].type


def test_the_description_lists_every_field_of_the_schema() -> None:
    assert list(FIELDS) == [f"{section}.{field}" for section, fields in Config().model_dump().items() for field in fields]


@pytest.mark.parametrize(
    ("override", "problem"),
    [
        ("server.port=70000", "server.port must be at most 65535, got 70000"),
        ("server.port=-1", "server.port must be at least 0, got -1"),
        ("server.port=abc", 'server.port must be a whole number, got "abc"'),
        ("server.port=1.5", "server.port must be a whole number, got 1.5"),
        ("server.port=true", "server.port must be a whole number, got true"),
        ("server.port=", "server.port must be a whole number, got null"),
        ('server.port="80"', 'server.port must be a whole number, got "80"'),
        ("server.host=3", "server.host must be text (write numbers and the like in quotes), got 3"),
        ("server.request_timeout_s=0", "server.request_timeout_s must be greater than 0, got 0"),
        ("server.request_timeout_s=.inf", "server.request_timeout_s must be a finite number, got Infinity"),
        ("server.request_timeout_s=.nan", "server.request_timeout_s must be a finite number, got NaN"),
        ("server.request_timeout_s=soon", 'server.request_timeout_s must be a number, got "soon"'),
        ("scheduler.prefix_cache=off", 'scheduler.prefix_cache must be true or false, got "off"'),
        ("model.dtype=float16", "model.dtype must be one of 'float32' or 'bfloat16', got \"float16\""),
        ("engine.prefill_buckets=5", "engine.prefill_buckets must be a list, got 5"),
        ("engine.prefill_buckets=[x, 512]", 'engine.prefill_buckets[0] must be a whole number, got "x"'),
        ("engine.prefill_buckets=[512, 16]", "engine.prefill_buckets must be rising positive numbers, got [512, 16]"),
        ("engine.prefill_buckets=[]", "engine.prefill_buckets must be rising positive numbers, got []"),
        ("engine.max_running=17", "engine.decode_buckets ends at 16, below engine.max_running 17"),
        ("scheduler.max_step_tokens=513", "scheduler.max_step_tokens 513 exceeds the largest of engine.prefill_buckets 512"),
        ("scheduler.max_step_tokens=15", "scheduler.max_step_tokens 15 is less than a page, engine.page_size 16"),
        ("worker.router=nowhere", "worker.router: must be HOST:PORT with a port from 1 to 65535, got 'nowhere'"),
        ("worker.router=host:0", "worker.router: must be HOST:PORT with a port from 1 to 65535, got 'host:0'"),
        ("sever.port=1", "unknown section sever; did you mean server?"),
        ("zzz.port=1", "unknown section zzz; the sections are " + ", ".join(Config.model_fields)),
        ("server.prot=1", "unknown field server.prot; did you mean server.port?"),
        ("engine.control_port=1", "unknown field engine.control_port; did you mean router.control_port?"),
        ("log.zzz=1", "unknown field log.zzz; log has level"),
        ("server.port", "expected SECTION.FIELD=VALUE, got 'server.port'"),
        ("port=1", "expected SECTION.FIELD=VALUE, got 'port=1'"),
        ("server.=1", "expected SECTION.FIELD=VALUE, got 'server.=1'"),
        ("server.port=[1", "server.port: '[1' is not valid YAML: line 1: expected ',' or ']', but got '<stream end>'"),
    ],
)
def test_a_bad_word_gives_one_line_with_name_value_and_limit(override: str, problem: str) -> None:
    assert problems_of(override) == [f"command line: {problem}"]


def test_a_slow_heartbeat_is_refused_with_both_values() -> None:
    [problem] = problems_of("worker.heartbeat_interval_s=2")
    assert "worker.heartbeat_interval_s 2.0 is more than half of router.heartbeat_timeout_s 3.0" in problem


def test_every_problem_of_file_and_words_is_reported_with_its_place(tmp_path: Path) -> None:
    file = written(tmp_path, "server:\n  prot: 1\n  max_choices: 0\nlogs: {}\nengine: 3\n")
    assert problems_of("model.dtype=int8", "server.port=-5", path=file) == [
        f"{file}: unknown field server.prot; did you mean server.port?",
        f"{file}: unknown section logs; did you mean log?",
        f"{file}: engine must hold fields, got 3",
        "command line: model.dtype must be one of 'float32' or 'bfloat16', got \"int8\"",
        "command line: server.port must be at least 0, got -5",
        f"{file}: server.max_choices must be at least 1, got 0",
    ]


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("server:\n  port: 1\n  port: 2\n", "line 3: 'port' is given twice, in line 2 and again"),
        ("server: {}\nlog: {}\nserver: {}\n", "line 3: 'server' is given twice, in line 1 and again"),
        ("server:\n  1: 2\n", "line 2: a key must be text, got 1"),
        ("server: [\n", "line 2: expected the node content, but found '<stream end>'"),
        ("- server\n", 'must hold sections with fields, got ["server"]'),
        ("server: !!python/object/apply:os.getpid []\n", "line 1: could not determine a constructor for the tag"),
    ],
)
def test_a_broken_file_is_refused_with_the_line(text: str, problem: str, tmp_path: Path) -> None:
    [line] = problems_of(path=written(tmp_path, text))
    assert line.startswith(f"{tmp_path / 'system.yaml'}: {problem}")


def test_a_missing_file_and_a_folder_are_refused_by_name(tmp_path: Path) -> None:
    assert problems_of(path=tmp_path / "none.yaml") == [f"there is no configuration file {tmp_path / 'none.yaml'}"]
    assert problems_of(path=tmp_path) == [f"{tmp_path}: cannot be read: Is a directory"]


def test_words_win_over_the_file_and_later_words_over_earlier_ones(tmp_path: Path) -> None:
    file = written(tmp_path, "server:\n  port: 1\n  host: h\n")
    config = load_config(file, ["server.port=2", "server.port=3"])
    assert (config.server.port, config.server.host) == (3, "h")


@pytest.mark.parametrize("text", ["", "# only a comment\n", "server:\nlog:\n  # level: debug\n"])
def test_empty_files_and_sections_leave_the_defaults(text: str, tmp_path: Path) -> None:
    assert load_config(written(tmp_path, text)) == Config()


@pytest.mark.parametrize(
    ("text", "value"),
    [("1e-3", 0.001), ("5", 5.0), ("+2.5", 2.5), (".5", 0.5), ("010", 10.0), ("1E2", 100.0)],
)
def test_numbers_are_read_as_yaml_1_2_has_them(text: str, value: float) -> None:
    assert load_config(None, [f"server.request_timeout_s={text}"]).server.request_timeout_s == value


@pytest.mark.parametrize("text", ["yes", "off", "12:30", "2024-01-01", "0x1F", "1_000"])
def test_words_that_yaml_1_1_takes_for_something_else_stay_text(text: str) -> None:
    assert load_config(None, [f"model.name={text}"]).model.name == text


def test_null_resets_a_field_that_may_be_null() -> None:
    assert load_config(None, ["engine.compile_cache=null"]).engine.compile_cache is None
    assert load_config(None, ["engine.compile_cache="]).engine.compile_cache is None


@pytest.mark.parametrize("name", ["null", "true", "3", "1e5", "a: b", "#1", "", " x", "émoji 🙂", "it's", 'say "hi"', "{a}", "line\nbreak"])
def test_a_printed_configuration_loads_to_an_equal_one_whatever_the_text(name: str, tmp_path: Path) -> None:
    config = Config.model_validate({"model": {"name": name}, "engine": {"decode_buckets": [8, 64]}, "worker": {"router": "r:1"}})
    assert load_config(written(tmp_path, dump_config(config))) == config


def test_a_printed_configuration_says_what_its_nulls_stand_for() -> None:
    assert "  metadata_slots: null  # metadata rows of one worker; default: 2 x engine.max_running\n" in dump_config(Config())


def test_the_default_file_says_nothing_but_the_defaults() -> None:
    assert DEFAULT_FILE.name == "quickstart.yaml"
    assert load_config() == Config()


def test_packaged_files_are_found_from_any_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    config = load_config("configs/notebook.yaml")
    assert (config.transfer.kind, config.prefill.device, config.decode.device) == ("device_put", 0, None)
    assert config.engine.num_pages < Config().engine.num_pages


def test_a_file_in_the_current_folder_wins_over_a_packaged_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "configs").mkdir()
    (tmp_path / "configs" / "notebook.yaml").write_text("server: {port: 77}\n")
    monkeypatch.chdir(tmp_path)
    assert load_config("configs/notebook.yaml").server.port == 77


def test_a_configuration_cannot_be_changed_after_loading() -> None:
    with pytest.raises(ValueError, match="frozen"):
        load_config().server.port = 1
