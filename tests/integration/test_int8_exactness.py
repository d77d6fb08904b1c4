"""On the exact path a sequence's logits are the same bits whatever is computed around them, and so are its tokens."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from common.config import cache_dir
from common.kv.cache import KVCache
from common.kv.layout import KVFormat
from common.model.assembly import load_transformer
from common.model.linear import Numerics, exactness
from common.model.loading import prepare_model
from common.model.prepared import PreparedModel
from common.model.runner import ModelRunner
from common.model.sampler import SampleRow, sample
from common.model.transformer import Transformer
from common.sampling import SamplingParams
from kernels.ops import select
from tests.support.paged_generation import PagedSequence, compute, make_cache, make_sequences, prefill
from tests.support.real_model import prepared_smollm2
from tests.support.tiny_models import FAMILIES, make_tiny_model

CPU = torch.device("cpu")
NUM_OUTPUT_TOKENS = 6
GREEDY, SAMPLED = SamplingParams(temperature=0.0, seed=1), SamplingParams(temperature=0.9, top_p=0.95, seed=7)
NUMS_ROWS = (1, 2, 3, 5, 8, 16, 33, 128, 512)


@dataclass(frozen=True)
class Case:
    transformer: Transformer
    prompts: list[list[int]]  # the first is watched, the others are strangers


def make_case(prepared: PreparedModel, cache: Path, length: int) -> Case:
    ops, config = select(CPU, "cpu", cache_dir()), prepared.config
    assert exactness(Numerics.INT8, ops.name) == (True, "")
    transformer = load_transformer(prepared, cache, ops, CPU, Numerics.INT8, 1024, lambda _: None).forward_pass
    lengths = [length, *(1 + (7 * i) % 70 for i in range(31))]
    generator = torch.Generator().manual_seed(0)
    return Case(transformer, [torch.randint(0, config.vocab_size, (n,), generator=generator).tolist() for n in lengths])


@pytest.fixture(scope="module", params=FAMILIES)
def tiny(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Case:
    root: Path = tmp_path_factory.mktemp("exactness")
    folder = make_tiny_model(root / "tiny", request.param)
    return make_case(prepare_model(str(folder), root / "cache", lambda _: None), root / "cache", 530)


@pytest.fixture(scope="module")
def smollm2() -> Case:
    return make_case(prepared_smollm2(), cache_dir(), 300)


@pytest.fixture(autouse=True)
def _threads_restored() -> Iterator[None]:
    before = torch.get_num_threads()
    yield
    torch.set_num_threads(before)


@dataclass(frozen=True)
class Answer:
    prompt_logits: torch.Tensor  # [length, V]
    step_logits: torch.Tensor  # [NUM_OUTPUT_TOKENS - 1, V]
    token_ids: list[int]


def answer(
    case: Case,
    params: SamplingParams = GREEDY,
    *,
    num_strangers: int = 0,
    chunk: int = 1024,
    kv_format: KVFormat = KVFormat.INT8,
    num_threads: int = 2,
) -> Answer:
    """The watched prompt's answer; strangers prefill and decode in the same steps."""
    torch.set_num_threads(num_threads)
    prompts = case.prompts[: 1 + num_strangers]
    cache = _cache(case, [len(prompt) + NUM_OUTPUT_TOKENS for prompt in prompts], kv_format)
    runner = ModelRunner(case.transformer, cache)
    sequences = make_sequences(prompts, NUM_OUTPUT_TOKENS, cache)
    rows = prefill(runner, sequences, chunk, keep_all=True)
    for position in range(NUM_OUTPUT_TOKENS):
        for sequence, token_id in zip(sequences, _sampled(rows, sequences, params, position), strict=True):
            sequence.token_ids.append(token_id)
        if position + 1 < NUM_OUTPUT_TOKENS:
            rows = compute(runner, sequences, [1] * len(sequences), keep_all=True)
    watched = sequences[0]
    logits, length = torch.stack(watched.logits), len(prompts[0])
    return Answer(logits[:length], logits[length:], watched.token_ids[length:])


def _cache(case: Case, lengths: list[int], kv_format: KVFormat) -> KVCache:
    return make_cache(case.transformer.config, kv_format, lengths, CPU)


def _sampled(
    rows: Sequence[torch.Tensor], sequences: Sequence[PagedSequence], params: SamplingParams, position: int
) -> list[int]:
    sample_rows = [
        SampleRow(params, position, s.token_ids[: s.num_prompt_tokens], s.token_ids[s.num_prompt_tokens :])
        for s in sequences
    ]
    return [sampled.token_id for sampled in sample(torch.stack(list(rows)), sample_rows)]


def assert_same(actual: Answer, expected: Answer) -> None:
    assert torch.equal(actual.prompt_logits, expected.prompt_logits)
    assert torch.equal(actual.step_logits, expected.step_logits)
    assert actual.token_ids == expected.token_ids


VARIATIONS = {
    "one thread": {"num_threads": 1},
    "chunks of 16": {"chunk": 16},
    "chunks of 64, one thread": {"chunk": 64, "num_threads": 1},
    "chunks of 37": {"chunk": 37},
    "one stranger": {"num_strangers": 1},
    "six strangers, chunks of 256": {"num_strangers": 6, "chunk": 256},
    "31 strangers": {"num_strangers": 31},
    "31 strangers, chunks of 16, one thread": {"num_strangers": 31, "chunk": 16, "num_threads": 1},
}


class TestTinyModels:
    @pytest.mark.parametrize("kv_format", KVFormat)
    @pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
    def test_company_chunks_and_threads_change_nothing(
        self, tiny: Case, params: SamplingParams, kv_format: KVFormat
    ) -> None:
        alone = answer(tiny, params, kv_format=kv_format)
        for name, variation in VARIATIONS.items():
            try:
                assert_same(answer(tiny, params, kv_format=kv_format, **variation), alone)
            except AssertionError as error:
                raise AssertionError(f"not the same: {name}") from error

    def test_any_number_of_rows(self, tiny: Case) -> None:
        """The prompt's logits from calls of so many rows each."""
        prompt = tiny.prompts[0]
        expected = answer(tiny).prompt_logits
        for num_rows in NUMS_ROWS[1:]:
            cache = _cache(tiny, [len(prompt)], KVFormat.INT8)
            sequences = make_sequences([prompt], 0, cache)
            prefill(ModelRunner(tiny.transformer, cache), sequences, num_rows, keep_all=True)
            assert torch.equal(torch.stack(sequences[0].logits), expected), num_rows

    def test_one_row_at_a_time(self, tiny: Case) -> None:
        prompt = tiny.prompts[0][:40]
        cache = _cache(tiny, [len(prompt)], KVFormat.INT8)
        sequences = make_sequences([prompt], 0, cache)
        prefill(ModelRunner(tiny.transformer, cache), sequences, 1, keep_all=True)
        assert torch.equal(torch.stack(sequences[0].logits), answer(tiny).prompt_logits[:40])


@pytest.mark.timeout(600)  # whoever comes first rounds the model's weights
@pytest.mark.parametrize("params", [GREEDY, SAMPLED], ids=["greedy", "sampled"])
def test_the_real_model(smollm2: Case, params: SamplingParams) -> None:
    alone = answer(smollm2, params)
    names = ("one thread", "chunks of 16", "six strangers, chunks of 256", "31 strangers, chunks of 16, one thread")
    for name in names:
        assert_same(answer(smollm2, params, **VARIATIONS[name]), alone)
