"""What a batch configuration says about a Ray cluster. Imports no Ray: it is read before anything is loaded."""

from __future__ import annotations

from pydantic import Field, field_validator

from pdjax.config.schema import Section


class RayConfig(Section):
    address: str | None = Field(
        None, description="HOST:PORT of the cluster, or auto; default: RAY_ADDRESS, a cluster that runs on this machine, or a new one there"
    )
    engines_per_node: int = Field(1, ge=1, le=64, description="engines on each node that has the resources for them")
    max_engines: int = Field(64, ge=1, le=1024, description="engines on all nodes together; nodes beyond that stay unused")
    num_cpus: float = Field(1.0, ge=0, description="CPUs that Ray sets aside for one engine")
    num_gpus: float = Field(0.0, ge=0, description="GPUs that Ray sets aside for one engine and lets it see")
    resources: dict[str, float] = Field({}, description="further Ray resources of one engine, such as {TPU: 4}")

    @field_validator("address")
    @classmethod
    def _is_no_client_address(cls, value: str | None) -> str | None:
        if value is not None and "://" in value:
            raise ValueError("must be HOST:PORT or auto; run the job on a node of the cluster, by `ray job submit` from elsewhere")
        return value

    @property
    def needs(self) -> dict[str, float]:
        """What a node must have for one engine, by Ray's names."""
        needs = {"CPU": self.num_cpus, "GPU": self.num_gpus, **self.resources}
        return {name: amount for name, amount in needs.items() if amount}
