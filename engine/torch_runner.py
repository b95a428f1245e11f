"""The runner that computes with torch on a CPU."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import torch

from core.config import EngineConfig
from core.cost.model_work import ModelSizes
from core.errors import ConfigError
from core.output_grammar import Grammars
from core.step import ScheduledChunk, StepPlan
from engine.backend import choose_backend, sorted_error
from engine.drafting import Drafter, Proposer
from engine.histories import Histories
from engine.host_memory import keep_freed_memory
from engine.kv_pool import KVPool, num_blocks_within
from engine.loading import ModelSetup, load_model
from engine.model import Model
from engine.sampling import Sampler
from engine.step_inputs import InputPreparer, PreparedStep
from engine.step_queue import Computed, PromisedTokens, QueuedRunner

_StepInputs = tuple[StepPlan, PreparedStep, Sampler]


class TorchRunner(QueuedRunner[_StepInputs]):
    """The constructor loads the model and allocates the pool. Raises `ConfigError` or `ModelNotFound`."""

    def __init__(
        self,
        config: EngineConfig,
        cache_dir: Path | None = None,
        grammars: Grammars | None = None,
        drafter: Drafter | None = None,
    ) -> None:
        super().__init__()
        setup = ModelSetup.of(config, cache_dir)
        if setup.layout.has_scales:
            raise ConfigError(f"kv_dtype = {config.kv_dtype} needs a GPU and kernels = auto: set kv_dtype to auto")
        self.info, self.layout = setup.info, setup.layout
        self.sizes: ModelSizes | None = setup.sizes
        self.num_blocks = num_blocks_within(self.layout, config.host_kv_memory_mb)
        self._pool = KVPool(self.layout, self.num_blocks, setup.device)
        backend = choose_backend(config, setup.model_config, self._pool, setup.num_threads, cache_dir)
        self._draw = backend.draw
        self._grammars = grammars
        self.takes_grammars = grammars is not None
        self.proposes = drafter is not None
        self._proposer = Proposer(drafter, grammars)
        self._histories = Histories()  # read and written in `_compute` alone
        self._preparer = InputPreparer(backend.attention, setup.rotary_table(self.num_blocks), setup.device)
        self._model: Model | None = load_model(setup, backend.linear_method, backend.ops, backend.dequantize)
        if setup.device.type == "cpu":
            keep_freed_memory()  # after loading, so malloc returns the loader's memory to the system

    def pool_address(self) -> int:
        return self._pool.address()

    def pool_memory(self) -> memoryview | None:
        return self._pool.memory()

    def pool_device(self) -> int | None:
        device = self._pool.tensor.device
        return None if device.type == "cpu" else device.index or 0

    def device_memory(self) -> None:
        return None

    def start_background_work(self) -> None:
        self._pool.touch_rest()

    def logits(self, chunks: Sequence[ScheduledChunk]) -> torch.Tensor:
        """Compute chunks without promised tokens, for measurements. No step is submitted. # -> float32 [S, vocab]"""
        assert self._model is not None, "the runner is closed"
        with torch.inference_mode():
            return self._model.compute(self._preparer.prepare(chunks).inputs())

    def close(self) -> None:
        self._model = None

    def _prepare(self, step: StepPlan) -> _StepInputs:
        try:
            with torch.inference_mode():  # a setting of each thread
                sampler = Sampler(step.chunks, self.info.eos_token_ids, self._histories)
                return step, self._preparer.prepare(step.chunks), sampler
        except RuntimeError as error:
            raise sorted_error(error) from error

    def _compute(self, inputs: _StepInputs, promised: PromisedTokens) -> Computed:
        assert self._model is not None, "the runner is closed"
        step, prepared, sampler = inputs
        masks_of = sampler.begin_masks(self._grammars, promised)
        try:
            with torch.inference_mode():
                logits = self._model.compute(prepared.inputs(list(promised.values())))
                if logits.is_cuda:
                    torch.cuda.current_stream(logits.device).synchronize()  # peers may read the KV after the return
                logits = logits.cpu()
        except RuntimeError as error:
            raise sorted_error(error) from error
        masks = masks_of()
        sampled = sampler.sample(logits.numpy(), promised, self._draw, masks)
        return Computed(sampled, masks.failed, self._proposer.propose(step, promised, sampled))
