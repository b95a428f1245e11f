"""Options of workers: their engine, scheduler and process."""

from __future__ import annotations

from dataclasses import dataclass, replace

from core.config.options import HOST, HOST_FORM, check_options, live, option, require

MAX_THREADS = 4096  # a typing error must not exhaust the threads of the machine
HOST_KV_MEMORY_MB = 512  # an automatic KV pool of a CPU worker: a laptop has room for several


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    # Limit: token budget of one step; 0 = 512 on a CPU, 8192 on a GPU; beyond: the next step
    max_batched_tokens: int = live(0)
    max_running: int = live(0)  # sequences in one step; 0 = 64 on a CPU, 256 on a GPU; beyond: the next step
    # Limit: sequences waiting for a step; beyond: `QueueFull`; the router tries elsewhere
    max_waiting: int = live(256, least=1)
    # Wanted time between tokens: a step with sequences in decode takes no longer
    slo_itl_ms: float = live(100.0, positive=True)

    def __post_init__(self) -> None:
        check_options(self)
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
    name: str = option("tandem", choices=("tandem", "vllm"))  # vllm has a table of its own
    # A catalogue name, a GGUF file, a Hugging Face directory, or random:<config>
    model: str = option("smollm2-135m", given=True)
    # auto = bfloat16 if the CPU or GPU multiplies it natively
    dtype: str = option("auto", choices=("auto", "float32", "bfloat16"))
    # Of the weights; the same on every worker
    quantization: str = option("none", choices=("none", "int8", "int4", "fp8"))
    # Of the KV pool; auto = dtype; fp8 has scales and needs the Triton kernels of a GPU
    kv_dtype: str = option("auto", choices=("auto", "fp8"))
    # cuda = cuda:0
    device: str = option("auto", pattern=r"auto|cpu|cuda(:\d{1,3})?", form="auto, cpu, cuda or cuda:N")
    block_size: int = option(16, least=1)  # tokens per KV block
    prefill_block_size: int = 0  # ... on prefill workers; 0 = the same. One must be a multiple of the other
    kv_memory_mb: int = 0  # size of the KV pool; 0 = 512 on a CPU, all that is left on a GPU
    gpu_memory_margin_mb: int = 1024  # of each worker on a GPU: stays free beside weights, graphs, steps and KV pool
    # Compute threads; 0 = the cores of the machine, or its CPU quota, divided among its workers
    num_threads: int = option(0, most=MAX_THREADS)
    pin_threads: bool = True  # pin compute threads to the worker's share of the cores, if they fit
    max_context: int = 0  # tokens of a prompt and its output; 0 = the limit of the model
    # auto = generation_config.json has the defaults of requests
    generation_config: str = option("auto", choices=("auto", "none"))
    # auto = C kernels on a CPU for which they compile, Triton kernels on a GPU
    kernels: str = option("auto", choices=("auto", "torch"))
    # Whether decode steps may compute guessed tokens; changes none; auto = lookup on a CPU alone
    speculation: str = option("auto", choices=("auto", "lookup", "off"))
    # Of the cores or the GPU of one worker, in 10^12 FLOP per second, for metrics; 0 = unknown
    peak_tflops: float = 0.0
    peak_gb_per_s: float = 0.0  # memory bandwidth of one worker, in 10^9 bytes per second, for metrics; 0 = unknown

    def __post_init__(self) -> None:
        check_options(self)
        small, large = sorted((self.block_size, self.prefill_block_size or self.block_size))
        require(
            large % small == 0,
            f"prefill_block_size must be 0 (as block_size) or a multiple or divisor of block_size ({self.block_size}), "
            f"is {self.prefill_block_size}",
        )
        require(
            self.name == "tandem" or self.speculation != "lookup",
            "speculation = lookup is not for workers with vLLM inside; [vllm] args has options of vLLM",
        )

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

    # Of a worker; 0.0.0.0 = every address; in a joined cluster, its machine's
    host: str = option("127.0.0.1", pattern=HOST, form=HOST_FORM)
    # Least interval between reports of changed load and blocks to the routers
    report_interval_s: float = live(0.05, positive=True)
    idle_report_interval_s: float = live(1.0, positive=True)  # interval between reports without a change
    # Limit: time limit for the open requests of a removed worker; beyond: they go on elsewhere
    drain_timeout_s: float = live(30.0, positive=True)
    # Limit: hand-offs that wait for blocks on a decode worker; beyond: `QueueFull`
    max_pulls_waiting: int = live(256, least=1)
    # Limit: time limit of a call without a deadline; beyond: DEADLINE_EXCEEDED
    default_timeout_s: float = live(600.0, positive=True)
    # Limit: time of one step; beyond: the worker's process is killed and replaced
    step_timeout_s: float = live(300.0, positive=True)

    def __post_init__(self) -> None:
        check_options(self)
