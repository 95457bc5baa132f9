"""The configuration of a batch job: a YAML file, checked before anything is loaded; every mistake becomes one readable line."""

from __future__ import annotations

import difflib
import importlib.util
import json
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import Field, ValidationError, model_validator

from pdjax.api.schemas import parse_chat, parse_completion
from pdjax.benchmarks.client import parse_url
from pdjax.config.load import COMMAND_LINE, ConfigError, load_config, read_document
from pdjax.config.schema import Config, Section
from pdjax.errors import BadRequest
from pdjax.jobs.ray_config import RayConfig

PARQUET = ".parquet"
ONE_PROCESS_TRANSFERS = ("device_put", "loopback")
"""Values of `transfer.kind` that move KV inside one process."""


class BatchConfig(Section):
    input: str = Field(min_length=1, description="requests, a line each: OpenAI's batch JSONL, plain prompts (JSONL), or Parquet")
    output: str = Field(min_length=1, description="results of the rows that went well: OpenAI's batch result JSONL, or Parquet")
    errors: str | None = Field(None, description="results of the rows that failed; default: the output's name with .errors.jsonl")
    url: str | None = Field(None, description="a running router to use, such as http://127.0.0.1:8000; default: an engine of its own")
    config: str | dict[str, dict[str, Any]] | None = Field(
        None, description="of the engine: a file as for `python -m pdjax.serve`, or its sections; default: the quickstart"
    )
    cluster: Literal["ray"] | None = Field(None, description="where engines run: `ray` for the nodes of a Ray cluster; default: here")
    ray: RayConfig = Field(RayConfig(), description="which cluster, and what an engine takes of it; only with cluster: ray")
    request: dict[str, Any] = Field({}, description="request fields of plain prompts that do not give them themselves")
    max_in_flight: int = Field(32, ge=1, le=4096, description="rows that are worked on at the same time, by each engine")
    timeout_s: float = Field(600.0, gt=0, description="deadline of one row, from its start")
    patience_s: float = Field(
        120.0, ge=0, description="how long a row is tried again while the system takes no requests; then the job stops, to be continued"
    )
    shuffle: bool = Field(False, description="random order, without regard to shared prefixes: for comparisons")

    @model_validator(mode="after")
    def _is_one_backend(self) -> Self:
        if self.url is not None:
            parse_url(self.url)
            if self.config is not None:
                raise ValueError("url and config exclude each other: a running router has its own configuration")
            if self.cluster is not None:
                raise ValueError("url and cluster exclude each other: a running router has its own workers")
        if self.cluster is None and "ray" in self.model_fields_set:
            raise ValueError("ray: has no effect without cluster: ray")
        return self

    @model_validator(mode="after")
    def _request_can_be_served(self) -> Self:
        """With some prompt; each row is checked for itself later."""
        if "prompt" in self.request or "messages" in self.request:
            raise ValueError("request: prompt and messages belong into the input")
        if self.request.get("stream"):
            raise ValueError("request.stream: a batch has no streams")
        fields = {"model": "any", **self.request}
        try:
            parse_completion({**fields, "prompt": "any"})
        except BadRequest as as_completion:
            try:
                parse_chat({**fields, "messages": [{"role": "user", "content": "any"}]})
            except BadRequest:
                raise ValueError(f"request: {as_completion}") from None
        return self


class Paths(NamedTuple):
    """Where a job reads and writes. The journals are JSONL and grow line by line; `output` and `errors` differ from them where Parquet
    is wanted, which is written at the end."""

    input: Path
    output: Path
    errors: Path
    output_journal: Path
    errors_journal: Path

    @property
    def identity(self) -> Path:
        """Says of which job the journals are."""
        return self.output_journal.with_name(self.output_journal.name + ".job")


class JobConfig(NamedTuple):
    """A checked job. `engine` None: the rows go to the router at `batch.url`."""

    batch: BatchConfig
    paths: Paths
    engine: Config | None

    @property
    def rows_in_flight(self) -> int:
        """Over all engines that there may be."""
        return self.batch.max_in_flight * (1 if self.batch.cluster is None else self.batch.ray.max_engines)


def load_job(file: Path) -> JobConfig:
    """Raises ConfigError with every problem that was found."""
    document = read_document(file)
    if not isinstance(document, dict):
        raise ConfigError([f"{file}: must hold fields, at least input and output"])
    try:
        batch = BatchConfig.model_validate_json(json.dumps(document, default=str), strict=True)
    except ValidationError as error:
        raise ConfigError([f"{file}: {_in_words(detail)}" for detail in error.errors(include_url=False)]) from None
    paths = _paths(batch, file)
    engine = None if batch.url is not None else _engine_config(batch, file)
    if engine is not None and batch.max_in_flight > (limit := min(engine.router.max_in_flight, engine.worker.max_queue)):
        problem = f"max_in_flight {batch.max_in_flight} exceeds what the engine takes at a time, {limit}: the least of router.max_in_flight"
        raise ConfigError([f"{file}: {problem} and worker.max_queue"])
    return JobConfig(batch, paths, engine)


def _paths(batch: BatchConfig, file: Path) -> Paths:
    source, output = _find_input(batch.input, file), Path(batch.output).expanduser()
    errors = output.with_suffix(".errors.jsonl") if batch.errors is None else Path(batch.errors).expanduser()
    paths = Paths(source, output, errors, _journal(output), _journal(errors))
    folders = dict.fromkeys((output.parent, errors.parent))
    problems = [f"{file}: there is no folder {folder} to write into" for folder in folders if not folder.is_dir()]
    problems += [f"{file}: cannot write {path}: it is a folder" for path in (output, errors) if path.is_dir()]
    written = [path.resolve() for path in (output, errors, paths.output_journal, paths.errors_journal)]
    if source.resolve() in written or output.resolve() == errors.resolve():
        problems.append(f"{file}: input, output and errors must be three files, got {source}, {output} and {errors}")
    if PARQUET in {path.suffix for path in (source, output, errors)} and importlib.util.find_spec("pyarrow") is None:
        problems.append(f"{file}: Parquet needs pyarrow, which is not installed: pip install 'pdjax[batch]'")
    if batch.cluster == "ray" and importlib.util.find_spec("ray") is None:
        problems.append(f"{file}: cluster: ray needs Ray, which is not installed: pip install 'pdjax[ray]'")
    if problems:
        raise ConfigError(problems)
    return paths


def _find_input(name: str, file: Path) -> Path:
    """In the current folder, else beside the configuration. Raises ConfigError."""
    here = Path(name).expanduser()
    for path in (here, file.parent / here):
        if path.is_file():
            return path
    raise ConfigError([f"{file}: there is no input {name}, neither in the current folder nor beside the configuration"])


def _journal(path: Path) -> Path:
    return path.with_name(path.name + ".jsonl") if path.suffix == PARQUET else path


def _engine_config(batch: BatchConfig, file: Path) -> Config:
    """KV stays in this process: by device_put, unless the configuration says how."""
    config = load_config(batch.config) if not isinstance(batch.config, dict) else _from_sections(batch.config, file)
    if "kind" not in config.transfer.model_fields_set:
        return config.model_copy(update={"transfer": config.transfer.model_copy(update={"kind": ONE_PROCESS_TRANSFERS[0]})})
    if config.transfer.kind not in ONE_PROCESS_TRANSFERS:
        choices = " or ".join(ONE_PROCESS_TRANSFERS)
        raise ConfigError([f"{file}: transfer.kind {config.transfer.kind} moves KV between processes; a batch job takes {choices}"])
    return config


def _from_sections(sections: dict[str, dict[str, Any]], file: Path) -> Config:
    """Laid over the quickstart as a command line would be, so that mistakes are found and worded in the same place."""
    overrides = [f"{section}.{name}={json.dumps(value)}" for section, fields in sections.items() for name, value in fields.items()]
    try:
        return load_config(None, overrides)
    except ConfigError as error:
        raise ConfigError([problem.replace(f"{COMMAND_LINE}:", f"{file}: config:", 1) for problem in error.problems]) from None


def _in_words(detail: Any) -> str:
    """One of pydantic's mistakes: the field, what is wrong and what was given."""
    name = ".".join(str(part) for part in detail["loc"])
    message = str(detail["msg"]).removeprefix("Value error, ")
    if detail["type"] == "extra_forbidden":
        near = difflib.get_close_matches(name, list(BatchConfig.model_fields), n=1)
        hint = f"did you mean {near[0]}?" if near else f"the fields are {', '.join(BatchConfig.model_fields)}"
        return f"unknown field {name}; {hint}"
    if detail["type"] == "missing":
        return f"{name} is required"
    return f"{name}: {message}, got {json.dumps(detail['input'], default=str)[:80]}" if name else message
