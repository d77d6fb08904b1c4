"""The seeds of a request's choices, as documented."""

import hashlib

from hypothesis import given
from hypothesis import strategies as st

from gateway.seeds import choice_seed

seeds = st.integers(0, 2**64 - 1)
indices = st.integers(0, 127)


@given(seeds)
def test_the_first_choice_has_the_request_s_own_seed(seed: int) -> None:
    assert choice_seed(seed, 0, 0) == seed


@given(seeds, indices, indices)
def test_a_prompt_alone_with_its_seed_gives_its_choices(seed: int, prompt_index: int, choice_index: int) -> None:
    assert choice_seed(choice_seed(seed, prompt_index, 0), 0, choice_index) == choice_seed(
        seed, prompt_index, choice_index
    )


@given(seeds)
def test_choices_and_prompts_do_not_share_seeds(seed: int) -> None:
    derived = {choice_seed(seed, prompt, choice) for prompt in range(8) for choice in range(8)}
    assert len(derived) == 64
    assert all(0 <= other < 2**63 for other in derived - {seed})


def test_the_hash_is_the_documented_one() -> None:
    content = b"twostroke/choice" + (42).to_bytes(8, "little") + (1).to_bytes(8, "little")
    expected = int.from_bytes(hashlib.sha256(content).digest()[:8], "little") % 2**63
    assert choice_seed(42, 0, 1) == expected
