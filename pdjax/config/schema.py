"""The configuration of a pdjax system: frozen pydantic models, one a section. Unknown keys are errors."""

from __future__ import annotations

from typing import Literal

from pydantic import BaseModel, ConfigDict, Field, field_validator, model_validator

from pdjax.config.chips import ChipName


class Section(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, protected_namespaces=())


class ModelConfig(Section):
    source: str = Field(
        "embedded:smollm2-135m-instruct",
        description="where the model comes from: `embedded:NAME`, a .gguf file, a Hugging Face folder, a folder that `pdjax.convert` wrote, "
        "OWNER/NAME on the hub, or `random:SHAPE`, random weights of a named shape or a config.json, for measurements",
    )
    name: str | None = Field(None, description="the name that clients use; default: taken from the source")
    dtype: Literal["float32", "bfloat16"] = Field("float32", description="dtype of weights and arithmetic")
    max_context_tokens: int = Field(8192, ge=16, description="longest prompt plus answer, in tokens; at most what the model was made for")


class ServerConfig(Section):
    host: str = Field("127.0.0.1", description="address that the router's HTTP server binds to")
    port: int = Field(8000, ge=0, le=65535, description="port of the router's HTTP server; 0 takes any free one")
    max_body_bytes: int = Field(8 << 20, ge=1024, description="largest request body that is read")
    request_timeout_s: float = Field(600.0, gt=0, description="deadline of a request, from its arrival to its last token")
    default_max_tokens: int = Field(256, ge=1, description="max_tokens of a chat request that names none (completions: 16, as OpenAI)")
    max_choices: int = Field(16, ge=1, description="answers that one request may ask for: its prompts times `n`")


class RouterConfig(Section):
    control_host: str = Field("127.0.0.1", description="address that workers register at")
    control_port: int = Field(8001, ge=0, le=65535, description="port that workers register at; 0 takes any free one")
    max_in_flight: int = Field(256, ge=1, description="sequences in the system; beyond that clients get a 429")
    max_attempts: int = Field(4, ge=1, description="attempts at one sequence, the first included")
    heartbeat_timeout_s: float = Field(3.0, gt=0, description="silence after which a worker counts as gone")
    stall_timeout_s: float = Field(
        30.0,
        gt=0,
        description="how long a sequence may hear nothing from a worker that has left in order before it is tried elsewhere",
    )


class BatchesConfig(Section):
    directory: str | None = Field(
        None, description="folder in which the router keeps the files and batches of /v1/files and /v1/batches; null: these are off"
    )
    max_file_bytes: int = Field(200 << 20, ge=1024, description="largest file that is taken")
    max_stored_bytes: int = Field(10 << 30, ge=1024, description="all files together; beyond that none is taken, results apart")
    max_rows: int = Field(50_000, ge=1, description="requests of one batch")
    max_open: int = Field(100, ge=1, description="batches that have not ended; beyond that clients get a 429")
    max_in_progress: int = Field(2, ge=1, description="batches that are worked on at the same time; the others wait")
    max_in_flight: int = Field(
        8, ge=1, description="rows of all batches that are worked on at the same time; what is left of the system is for other requests"
    )


class WorkerConfig(Section):
    host: str = Field("127.0.0.1", description="address that a worker's gRPC server binds to")
    port: int = Field(
        0, ge=0, le=65535, description="port of a worker's gRPC server, further ranks take those behind it; 0 takes any free ones"
    )
    advertise_host: str | None = Field(None, description="address under which others reach this worker; default: worker.host")
    router: str | None = Field(None, description="HOST:PORT to register at; default: router.control_host and router.control_port")
    heartbeat_interval_s: float = Field(0.5, gt=0, description="time between two signs of life to the router")
    max_queue: int = Field(128, ge=1, description="sequences that may wait on one worker; beyond that the worker refuses")
    chip: ChipName | None = Field(
        None, description="what a worker's devices are, so that what does not fit their memory is refused before anything is loaded"
    )
    num_chips: int | None = Field(
        None, ge=1, description="how many devices a worker process sees, so that ranks that need more are refused before anything is loaded"
    )
    num_hosts: int = Field(1, ge=1, description="processes, each on a machine of its own, that run one worker together")
    host_index: int = Field(0, ge=0, description="which of them this process is; 0 leads: it schedules, and others reach the worker there")
    coordinator: str | None = Field(None, description="HOST:PORT at which host 0 waits for the other hosts of its worker")

    @field_validator("router", "coordinator")
    @classmethod
    def _is_an_address(cls, value: str | None) -> str | None:
        if value is None:
            return None
        host, _, port = value.rpartition(":")
        if not host or not port.isdecimal() or not 1 <= int(port) <= 65535:
            raise ValueError(f"must be HOST:PORT with a port from 1 to 65535, got {value!r}")
        return value


class PrefillConfig(Section):
    count: int = Field(1, ge=0, description="prefill workers that `--role all` starts")
    device: int = Field(0, ge=0, description="index of the first JAX device for prefill when one process holds both roles")
    tensor_parallel: int = Field(1, ge=1, description="devices of one prefill worker, which share every layer")
    data_parallel: int = Field(
        1, ge=1, description="ranks of one prefill process: engines on tensor_parallel devices each, and each a worker of its own to others"
    )


class DecodeConfig(Section):
    count: int = Field(1, ge=0, description="decode workers that `--role all` starts")
    device: int | None = Field(
        None, ge=0, description="index of the first JAX device for decode when one process holds both roles; default: the one behind prefill's"
    )
    tensor_parallel: int = Field(1, ge=1, description="devices of one decode worker, which share every layer; may differ from prefill's")
    data_parallel: int = Field(
        1, ge=1, description="ranks of one decode process: engines on tensor_parallel devices each, and each a worker of its own to others"
    )


class EngineConfig(Section):
    page_size: int = Field(16, ge=1, description="tokens a KV page")
    num_pages: int = Field(768, ge=4, description="pages of the KV pool of one worker")
    kv_dtype: Literal["auto", "float32", "bfloat16", "float8_e4m3fn", "int8"] = Field(
        "auto", description="dtype of the KV pool and of KV on its way; both sides must agree. auto: that of model.dtype"
    )
    kv_scales: str | None = Field(
        None,
        description="file with the scales of an int8 pool (`python -m pdjax.kv_scales`), the same for all workers; null: each worker finds them "
        "from the weights",
    )
    weights_dtype: Literal["auto", "bfloat16", "int8"] = Field(
        "auto",
        description="dtype that the large matrices are stored in; arithmetic stays in model.dtype. int8: with a scale for each output channel. "
        "auto: model.dtype",
    )
    max_running: int = Field(16, ge=1, description="sequences that hold a request slot at the same time")
    max_prefill_seqs: int = Field(8, ge=1, description="sequences that share one prefill step")
    prefill_buckets: tuple[int, ...] = Field((16, 32, 64, 128, 256, 512), description="token counts that prefill steps are compiled for")
    decode_buckets: tuple[int, ...] = Field((1, 2, 4, 8, 16), description="batch sizes that decode steps are compiled for")
    transfer_buckets: tuple[int, ...] = Field((1, 4, 16, 32), description="page counts that gather and install are compiled for")
    compile_cache: str | None = Field(
        "~/.cache/pdjax/compile", description="folder of JAX's persistent compilation cache; null switches it off"
    )

    @model_validator(mode="after")
    def _buckets_make_sense(self) -> EngineConfig:
        for name in ("prefill_buckets", "decode_buckets", "transfer_buckets"):
            buckets = getattr(self, name)
            if not buckets or list(buckets) != sorted(set(buckets)) or buckets[0] < 1:
                raise ValueError(f"engine.{name} must be rising positive numbers, got {list(buckets)}")
        if self.decode_buckets[-1] < self.max_running:
            raise ValueError(
                f"engine.decode_buckets ends at {self.decode_buckets[-1]}, below engine.max_running {self.max_running}"
            )
        return self


class SchedulerConfig(Section):
    prefix_cache: bool = Field(True, description="keep the KV of finished prompts in a radix tree for requests that share their start")
    max_step_tokens: int = Field(512, ge=1, description="token budget of one prefill step; longer prompts are computed in chunks")
    metadata_slots: int | None = Field(None, ge=1, description="metadata rows of one worker; default: 2 x engine.max_running")
    optimistic_prefill_retries: int = Field(
        1,
        ge=0,
        le=100,
        description="forwards that may be lost to a prompt because decode had not announced itself in time; 0: never go ahead",
    )
    on_miss: Literal["park", "retry"] = Field(
        "park", description="a prompt computed before decode announced itself: keep its KV (park), or let go of it at once (retry)"
    )
    max_held_pages: int = Field(
        256, ge=0, description="pages kept gathered beside the pool for prompts that decode has not announced yet, so that they leave at once"
    )
    early_send_cached_prefix: bool = Field(
        True, description="send the part of a prompt that is cached on prefill before the rest is computed"
    )
    decode_reserve_tokens: int = Field(32, ge=1, description="room for output tokens that decode reserves when it admits a sequence")


class TransferConfig(Section):
    kind: Literal["tcp", "jax_transfer", "device_put", "loopback"] = Field(
        "tcp",
        description="how KV moves: `tcp` between processes through host memory, `jax_transfer` between processes from device to device, "
        "`device_put` inside one process, `loopback` for benchmarks without a link",
    )
    max_chunks_in_flight: int = Field(4, ge=1, description="chunks of one sequence between gather and install")
    bootstrap_timeout_s: float = Field(30.0, gt=0, description="how long decode waits for prefill's answer to its announcement")
    stall_timeout_s: float = Field(10.0, gt=0, description="how long a running transfer may make no progress")
    max_offered_bytes: int = Field(
        256 << 20, ge=1, description="jax_transfer: KV that one prefill worker holds ready to be pulled, over all sequences"
    )
    emulate_gbytes_per_s: float | None = Field(
        None, gt=0, description="for measurements only: a link of this many 10^9 bytes a second out of each prefill worker; null: no limit"
    )
    emulate_announce_delay_s: float = Field(
        0.0, ge=0, description="for measurements only: time by which decode announces a sequence later than it could"
    )

    @model_validator(mode="after")
    def _announcements_come_in_time(self) -> TransferConfig:
        if self.emulate_announce_delay_s >= self.bootstrap_timeout_s:
            raise ValueError(
                f"transfer.emulate_announce_delay_s {self.emulate_announce_delay_s} must be below transfer.bootstrap_timeout_s "
                f"{self.bootstrap_timeout_s}"
            )
        return self


class LogConfig(Section):
    level: Literal["debug", "info", "warning", "error"] = Field("info", description="least severe level that is logged")


class Config(Section):
    """A whole system. Every process of it reads the same file and takes the sections that it needs."""

    model: ModelConfig = ModelConfig()
    server: ServerConfig = ServerConfig()
    router: RouterConfig = RouterConfig()
    batches: BatchesConfig = BatchesConfig()
    worker: WorkerConfig = WorkerConfig()
    prefill: PrefillConfig = PrefillConfig()
    decode: DecodeConfig = DecodeConfig()
    engine: EngineConfig = EngineConfig()
    scheduler: SchedulerConfig = SchedulerConfig()
    transfer: TransferConfig = TransferConfig()
    log: LogConfig = LogConfig()

    @property
    def kv_dtype(self) -> str:
        """Of the KV pool."""
        return self.model.dtype if self.engine.kv_dtype == "auto" else self.engine.kv_dtype

    @property
    def weights_dtype(self) -> str:
        """Of the large matrices, as they are stored."""
        return self.model.dtype if self.engine.weights_dtype == "auto" else self.engine.weights_dtype

    def workers(self, role: Literal["prefill", "decode"]) -> PrefillConfig | DecodeConfig:
        """What is said of the workers of `role`."""
        return self.prefill if role == "prefill" else self.decode

    @model_validator(mode="after")
    def _ranks_find_their_chips(self) -> Config:
        """Of worker processes. The Python API, whose one process holds both roles, counts JAX's devices."""
        there = self.worker.num_chips
        for role in ("prefill", "decode"):
            width, number = self.workers(role).tensor_parallel, self.workers(role).data_parallel
            if there is not None and width * number > there * self.worker.num_hosts:
                raise ValueError(
                    f"{role}.data_parallel {number} with {role}.tensor_parallel {width} takes {width * number} chips, "
                    f"worker.num_chips is {there}"
                )
        return self

    @model_validator(mode="after")
    def _sections_fit_each_other(self) -> Config:
        if self.batches.directory is not None and self.batches.max_in_flight > self.router.max_in_flight:
            raise ValueError(f"batches.max_in_flight {self.batches.max_in_flight} exceeds router.max_in_flight {self.router.max_in_flight}")
        width = max(self.prefill.tensor_parallel, self.decode.tensor_parallel)
        if self.transfer.kind == "jax_transfer" and width > 1:
            raise ValueError(f"transfer.kind jax_transfer moves arrays of one device, tensor_parallel is {width}; use tcp")
        if self.scheduler.max_step_tokens < self.engine.page_size:
            raise ValueError(
                f"scheduler.max_step_tokens {self.scheduler.max_step_tokens} is less than a page, engine.page_size {self.engine.page_size}"
            )
        if self.scheduler.max_step_tokens > self.engine.prefill_buckets[-1]:
            raise ValueError(
                f"scheduler.max_step_tokens {self.scheduler.max_step_tokens} exceeds the largest of engine.prefill_buckets "
                f"{self.engine.prefill_buckets[-1]}"
            )
        if self.worker.heartbeat_interval_s * 2 > self.router.heartbeat_timeout_s:
            raise ValueError(
                f"worker.heartbeat_interval_s {self.worker.heartbeat_interval_s} is more than half of router.heartbeat_timeout_s "
                f"{self.router.heartbeat_timeout_s}: one late heartbeat would cost a worker"
            )
        return self
