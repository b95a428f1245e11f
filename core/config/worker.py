"""Options of workers: their engine, scheduler and process."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from core.config.live import live
from core.config.requirements import require, require_choice, require_finite_floats, require_given, require_positive

MAX_THREADS = 4096  # a typing error must not exhaust the threads of the machine
HOST_KV_MEMORY_MB = 512  # an automatic KV pool of a CPU worker: a laptop has room for several


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    # Limit: token budget of one step; 0 = 512 on a CPU, 8192 on a GPU; beyond: the next step
    max_batched_tokens: int = live(0)
    max_running: int = live(0)  # sequences in one step; 0 = 64 on a CPU, 256 on a GPU; beyond: the next step
    max_waiting: int = live(256)  # sequences waiting for a step; beyond: `QueueFull`; the router tries elsewhere
    slo_itl_ms: float = live(100.0)  # wanted time between tokens: a step with sequences in decode takes no longer

    def __post_init__(self) -> None:
        require_positive(self, "max_waiting", "slo_itl_ms")
        require_finite_floats(self)
        for name in ("max_batched_tokens", "max_running"):
            require(getattr(self, name) >= 0, f"{name} must be 0 (automatic) or more, is {getattr(self, name)}")
        require(
            self.max_batched_tokens >= self.max_running or not self.max_batched_tokens,
            f"max_batched_tokens ({self.max_batched_tokens}) must be at least max_running ({self.max_running}), "
            "so that one step can hold a token of every sequence",
        )

    def on_device(self, is_gpu: bool) -> SchedulerConfig:
        """These options with the sizes for a CPU or a GPU where they are automatic.

        A step of a CPU is slow, so a short one holds decodes up less. A GPU computes 8,192 tokens of a prompt in the
        time that it needs to be busy at all, and 256 decodes in about the time of one.
        """
        tokens, running = (8192, 256) if is_gpu else (512, 64)
        budget = self.max_batched_tokens or max(tokens, self.max_running)
        return replace(self, max_batched_tokens=budget, max_running=self.max_running or min(running, budget))


@dataclass(frozen=True, slots=True)
class EngineConfig:
    name: str = "tandem"  # tandem | vllm; vllm has a table of its own
    model: str = "smollm2-135m"  # a catalogue name, a GGUF file, a Hugging Face directory, or random:<config>
    dtype: str = "auto"  # auto | float32 | bfloat16; auto = bfloat16 if the CPU or GPU multiplies it natively
    quantization: str = "none"  # of the weights: none | int8 | int4 | fp8; the same on every worker
    kv_dtype: str = (
        "auto"  # of the KV pool: auto | fp8; auto = dtype; fp8 has scales and needs the Triton kernels of a GPU
    )
    device: str = "auto"  # auto | cpu | cuda | cuda:N; cuda = cuda:0
    block_size: int = 16  # tokens per KV block
    prefill_block_size: int = 0  # ... on prefill workers; 0 = the same. One must be a multiple of the other
    kv_memory_mb: int = 0  # size of the KV pool; 0 = 512 on a CPU, all that is left on a GPU
    gpu_memory_margin_mb: int = 1024  # of each worker on a GPU: stays free beside weights, graphs, steps and KV pool
    num_threads: int = 0  # compute threads; 0 = the cores of the machine, or its CPU quota, divided among its workers
    pin_threads: bool = True  # pin compute threads to the worker's share of the cores, if they fit
    max_context: int = 0  # tokens of a prompt and its output; 0 = the limit of the model
    generation_config: str = "auto"  # auto | none; auto = generation_config.json has the defaults of requests
    kernels: str = "auto"  # auto | torch; auto = C kernels on a CPU for which they compile, Triton kernels on a GPU
    # auto | lookup | off: whether decode steps may compute guessed tokens; changes none; auto = lookup on a CPU alone
    speculation: str = "auto"
    peak_tflops: float = (
        0.0  # of the cores or the GPU of one worker, in 10^12 FLOP per second, for metrics; 0 = unknown
    )
    peak_gb_per_s: float = 0.0  # memory bandwidth of one worker, in 10^9 bytes per second, for metrics; 0 = unknown

    def __post_init__(self) -> None:
        require_given(self, "model")
        require_choice(self, "name", "tandem", "vllm")
        require_positive(self, "block_size")
        require(self.kv_memory_mb >= 0, f"kv_memory_mb must be 0 (automatic) or more, is {self.kv_memory_mb}")
        require(
            self.gpu_memory_margin_mb >= 0, f"gpu_memory_margin_mb must be 0 or more, is {self.gpu_memory_margin_mb}"
        )
        small, large = sorted((self.block_size, self.prefill_block_size or self.block_size))
        require(
            small > 0 and large % small == 0,
            f"prefill_block_size must be 0 (as block_size) or a multiple or divisor of block_size ({self.block_size}), "
            f"is {self.prefill_block_size}",
        )
        require_choice(self, "dtype", "auto", "float32", "bfloat16")
        require_choice(self, "quantization", "none", "int8", "int4", "fp8")
        require_choice(self, "kv_dtype", "auto", "fp8")
        require(
            re.fullmatch(r"auto|cpu|cuda(:\d{1,3})?", self.device) is not None,
            f"device must be auto, cpu, cuda or cuda:N: {self.device}",
        )
        require_choice(self, "speculation", "auto", "lookup", "off")
        require(
            self.name == "tandem" or self.speculation != "lookup",
            "speculation = lookup is not for workers with vLLM inside; [vllm] args has options of vLLM",
        )
        require_choice(self, "generation_config", "auto", "none")
        require_choice(self, "kernels", "auto", "torch")
        require(
            0 <= self.num_threads <= MAX_THREADS,
            f"num_threads must be in [0, {MAX_THREADS}] (0 = share the cores), is {self.num_threads}",
        )
        require_finite_floats(self)
        require(self.max_context >= 0, f"max_context must be 0 (the model's own) or more, is {self.max_context}")

    @property
    def is_fake(self) -> bool:
        """Whether the fake runner takes the place of a model: it needs neither a GPU nor torch."""
        return self.model.startswith("fake:")

    @property
    def host_kv_memory_mb(self) -> int:
        """The size of a KV pool in the memory of the host."""
        return self.kv_memory_mb or HOST_KV_MEMORY_MB


@dataclass(frozen=True, slots=True)
class WorkerConfig:
    """The process of a prefill or decode worker, apart from its engine, scheduler and transfers."""

    host: str = "127.0.0.1"  # address of a worker; 0.0.0.0 = every address; in a joined cluster, its machine's
    report_interval_s: float = live(0.05)  # least interval between reports of changed load and blocks to the routers
    idle_report_interval_s: float = live(1.0)  # interval between reports without a change
    # Limit: time limit for the open requests of a removed worker; beyond: they go on elsewhere
    drain_timeout_s: float = live(30.0)
    max_pulls_waiting: int = live(256)  # hand-offs that wait for blocks on a decode worker; beyond: `QueueFull`
    default_timeout_s: float = live(600.0)  # time limit of a call without a deadline; beyond: DEADLINE_EXCEEDED
    step_timeout_s: float = live(300.0)  # time of one step; beyond: the worker's process is killed and replaced

    def __post_init__(self) -> None:
        require_positive(
            self, "report_interval_s", "idle_report_interval_s", "drain_timeout_s", "max_pulls_waiting",
            "default_timeout_s", "step_timeout_s",
        )  # fmt: skip
        require_finite_floats(self)
        require_given(self, "host")
