"""Tasks are pure functions of the item, and their rewards what they say."""

from __future__ import annotations

import re

import pytest

from sparsewire.rollout.tasks import open_task
from sparsewire.sync.errors import ConfigError


def test_addition_asks_for_two_digit_sums_and_rewards_the_last_number() -> None:
    task = open_task("addition")
    seen = set()
    for item in range(300):
        prompt = task.prompt(item)
        found = re.fullmatch(r"What is (\d\d) \+ (\d\d)\? Answer with just the number\.", prompt)
        assert found, prompt
        total = int(found[1]) + int(found[2])
        for right in (f" {total}\n", f"{total}.", f"{found[1]} + {found[2]} = {total}", f"The answer is {total}!"):
            assert task.score(item, right) == 1.0
        for wrong in (
            str(total + 1),
            "",
            "none",
            f"{total} is not {total + 1}",
            f"-{total}",
            f"{total}.5",
            f"{total}0",
        ):
            assert task.score(item, wrong) == 0.0
        seen.add(prompt)
    assert len(seen) > 280
    assert task.prompt(7) == open_task("addition").prompt(7)


def test_reasoning_gym_dataset_is_scored_by_its_own_verifier() -> None:
    task = open_task("reasoning-gym:basic_arithmetic", seed=3)
    again = open_task("reasoning-gym:basic_arithmetic", seed=3)
    other = open_task("reasoning-gym:basic_arithmetic", seed=4)
    assert [task.prompt(item) for item in range(5)] == [again.prompt(item) for item in range(5)]
    assert [task.prompt(item) for item in range(5)] != [other.prompt(item) for item in range(5)]
    from reasoning_gym import create_dataset

    entry = create_dataset("basic_arithmetic", seed=3, size=10)[2]
    assert task.prompt(2) == entry["question"]
    assert task.score(2, f" {entry['answer']} ") == 1.0
    assert task.score(2, f"I think so. <answer>{entry['answer']}</answer>") == 1.0
    assert task.score(2, "no idea") == 0.0


def test_items_beyond_a_dataset_start_over() -> None:
    task = open_task("reasoning-gym:acre")
    assert task.prompt(5) == task.prompt(5 + 4096)
    assert task.prompt(5) != task.prompt(6)


def test_verifier_that_raises_gives_no_reward() -> None:
    task = open_task("reasoning-gym:prime_factorization")
    for answer in ("", "\0", "(" * 5000, "x" * 1_000_000, "<answer></answer>"):
        assert 0.0 <= task.score(0, answer) <= 1.0


@pytest.mark.parametrize(
    ("name", "suggestion"),
    [
        ("additoin", "addition"),
        ("reasoning-gym:basic_arithmetics", "reasoning-gym:basic_arithmetic"),
        ("basic_arithmetic", "reasoning-gym:basic_arithmetic"),
        ("zzz", "reasoning-gym:<dataset>"),
    ],
)
def test_unknown_task_is_a_config_error_with_suggestions(name: str, suggestion: str) -> None:
    with pytest.raises(ConfigError) as caught:
        open_task(name)
    assert suggestion in str(caught.value)
