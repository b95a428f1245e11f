"""Finds the model for a model spec of the operator, and describes it. Imports no torch.

smollm2-135m      a name in the catalogue; `tandem pull` downloads the model first
path/to/x.gguf    a GGUF file
path/to/dir       a Hugging Face directory: config.json and safetensors
random:<config>   random weights of a built-in config, the same on every machine
fake:<config>     no model: the fake runner
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from pathlib import Path

import xxhash

from core.errors import ConfigError, ModelNotFound
from core.model_info import ModelInfo
from model_files.builtin_configs import BYTE_BOS_ID, BYTE_EOS_ID, BYTE_VOCAB_SIZE, FAKE_CONFIGS, RANDOM_CONFIGS
from model_files.catalogue import CATALOGUE, cached_path, default_cache_dir, is_cached
from model_files.end_tokens import ends_of_directory, ends_of_gguf
from model_files.fields import Fields, optional_file, read_json
from model_files.gguf_file import GGUFFile
from model_files.model_config import ModelConfig, config_from_gguf, config_from_hf

_NUM_SAMPLES, _SAMPLE_BYTES = 64, 1 << 16
_PART_BYTES = 1 << 22  # of a file that is read whole


class SourceKind(Enum):
    GGUF = "gguf"
    HUGGING_FACE = "hugging face"
    RANDOM = "random"
    FAKE = "fake"


@dataclass(frozen=True, slots=True)
class ModelSource:
    name: str  # model name for clients and dashboards
    kind: SourceKind
    path: Path | None = None  # of the GGUF file or the directory; None for random and fake models
    config_name: str = ""  # of a random or fake model


def resolve_model(spec: str, cache_dir: Path | None = None) -> ModelSource:
    """The source for `spec`. Downloads nothing. Raises `ModelNotFound`, which lists the valid specs."""
    for prefix, kind, known in (
        ("random:", SourceKind.RANDOM, RANDOM_CONFIGS.keys()),
        ("fake:", SourceKind.FAKE, FAKE_CONFIGS.keys()),
    ):
        if spec.startswith(prefix):
            config_name = spec.removeprefix(prefix)
            if config_name not in known:
                listed = ", ".join(prefix + name for name in known)
                raise ModelNotFound(f"there is no built-in config {spec!r}; there are {listed}")
            return ModelSource(spec, kind, config_name=config_name)
    if spec in CATALOGUE:
        entry, cache_dir = CATALOGUE[spec], cache_dir or default_cache_dir()
        if not is_cached(entry, cache_dir):
            raise ModelNotFound(f"the model {spec} is not on this machine yet: run `tandem pull {spec}`")
        return ModelSource(spec, SourceKind.GGUF, cached_path(entry, cache_dir))
    path = Path(spec).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return ModelSource(path.stem, SourceKind.GGUF, path)
    if (path / "config.json").is_file():
        return ModelSource(_directory_name(path.resolve()), SourceKind.HUGGING_FACE, path)
    raise ModelNotFound(
        f"there is no model {spec!r}: give a name ({', '.join(CATALOGUE)}), a .gguf file, a directory with "
        f"config.json, random:<config> ({', '.join(RANDOM_CONFIGS)}) or fake:<config> ({', '.join(FAKE_CONFIGS)})"
    )


def _directory_name(path: Path) -> str:
    """A directory of Hugging Face's cache, models--ORG--NAME/snapshots/COMMIT, has the name of its repository."""
    repository = path.parent.parent.name
    if path.parent.name == "snapshots" and repository.startswith("models--"):
        return repository.removeprefix("models--").replace("--", "/", 1)
    return path.name


def load_model_info(spec: str, max_context: int = 0, cache_dir: Path | None = None) -> ModelInfo:
    """The description of a model, which the router and the workers use."""
    return describe(resolve_model(spec, cache_dir), max_context)


def describe(source: ModelSource, max_context: int = 0, own_engine: bool = True) -> ModelInfo:
    """As `load_model_info`, for a resolved source. `own_engine`: raise `ConfigError` for what it cannot compute."""
    file = GGUFFile(source.path) if source.kind is SourceKind.GGUF and source.path else None
    if source.kind is SourceKind.FAKE:
        vocab_size, context_length = BYTE_VOCAB_SIZE, usable_context(source, max_context)
    elif source.kind is SourceKind.HUGGING_FACE and source.path is not None and not own_engine:
        vocab_size, context_length = _sizes_of(source, source.path, max_context)
    else:
        config = config_from_gguf(file) if file else load_config(source)
        vocab_size, context_length = config.vocab_size, config.usable_context(max_context)
    eos_token_ids, bos_token_id = _special_ids(source, file, vocab_size)
    return ModelInfo(source.name, fingerprint(source), vocab_size, context_length, eos_token_ids, bos_token_id)


def _sizes_of(source: ModelSource, directory: Path, max_context: int) -> tuple[int, int]:
    """(vocabulary, context) of any model, from its config.json. A model with images has those of its text inside."""
    raw = read_json(directory / "config.json")
    fields = Fields(
        raw.get("text_config", raw) if isinstance(raw.get("text_config", raw), dict) else raw, "config.json"
    )
    context_length = fields.integer("max_position_embeddings")
    if max_context > context_length:
        raise ConfigError(f"max_context must be at most {context_length} for {source.name}, is {max_context}")
    return fields.integer("vocab_size"), max_context or context_length


def usable_context(source: ModelSource, max_context: int = 0) -> int:
    """The context to serve, in tokens, as `ModelConfig.usable_context`. Reads no weights. Raises `ConfigError`."""
    if source.kind is not SourceKind.FAKE:
        return load_config(source).usable_context(max_context)
    context_length = FAKE_CONFIGS[source.config_name].context_length
    if max_context > context_length:
        raise ConfigError(f"max_context must be at most {context_length} for {source.name}, is {max_context}")
    return max_context or context_length


def load_config(source: ModelSource) -> ModelConfig:
    """The architecture of a model. A fake model has none."""
    if source.kind is SourceKind.RANDOM:
        return RANDOM_CONFIGS[source.config_name]
    assert source.path is not None, f"{source.kind} has no architecture"
    if source.kind is SourceKind.GGUF:
        return config_from_gguf(GGUFFile(source.path))
    return config_from_hf(read_json(source.path / "config.json"))


def fingerprint(source: ModelSource) -> str:
    """A hash of the content of the weights, independent of their path: 16 hex digits.

    For a built-in model, a hash of its name. For files, a hash of their sizes and of 64 evenly spaced samples of each
    file, because reading a whole large model takes long. Two fine-tunes of one model differ in most of the samples.
    """
    hasher = xxhash.xxh3_64()
    if source.path is None:
        hasher.update(source.name.encode())
        return hasher.hexdigest()
    if source.kind is SourceKind.GGUF:
        _hash_samples(hasher, source.path)
        return hasher.hexdigest()
    hasher.update((source.path / "config.json").read_bytes())
    for weights in sorted(source.path.glob("*.safetensors")):
        hasher.update(weights.name.encode())
        _hash_samples(hasher, weights)
    return hasher.hexdigest()


def content_digest(source: ModelSource) -> str:
    """A hash of every byte of the weights and of config.json: 32 hex digits. Takes as long as reading the files."""
    hasher = xxhash.xxh3_128(source.name.encode() if source.path is None else b"")
    paths = [] if source.path is None else [source.path]
    if source.kind is SourceKind.HUGGING_FACE and source.path is not None:
        paths = [source.path / "config.json", *sorted(source.path.glob("*.safetensors"))]
    for path in paths:
        hasher.update(path.stat().st_size.to_bytes(8, "little"))
        with path.open("rb") as file:
            while part := file.read(_PART_BYTES):
                hasher.update(part)
    return hasher.hexdigest()


def _hash_samples(hasher: xxhash.xxh3_64, path: Path) -> None:
    try:
        num_bytes = path.stat().st_size
        hasher.update(num_bytes.to_bytes(8, "little"))
        step = max(_SAMPLE_BYTES, num_bytes // _NUM_SAMPLES)
        with path.open("rb") as file:
            for offset in range(0, num_bytes, step):
                file.seek(offset)
                hasher.update(file.read(_SAMPLE_BYTES))
    except OSError as error:
        raise ConfigError(f"cannot read {path}: {error}") from error


def _special_ids(source: ModelSource, file: GGUFFile | None, vocab_size: int) -> tuple[frozenset[int], int | None]:
    """(ids that end an output, id that begins a text). Raises `ConfigError` for an id outside the vocabulary."""
    if source.kind in (SourceKind.FAKE, SourceKind.RANDOM):
        return frozenset({BYTE_EOS_ID}), BYTE_BOS_ID
    if file is not None:
        ends, first = ends_of_gguf(file.fields, vocab_size), [(file.fields, "tokenizer.ggml.bos_token_id")]
    else:
        assert source.path is not None
        ends, names = ends_of_directory(source.path, vocab_size), ("config.json", "generation_config.json")
        first = [(optional_file(source.path / name), "bos_token_id") for name in names]
    begins = [fields.integer(key, least=0, most=vocab_size - 1) for fields, key in first if key in fields]
    return ends, begins[-1] if begins else None
