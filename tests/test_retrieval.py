"""Hidden numbers are where their probes say, whole answers count, greedy continuations are those of generate."""

from typing import Any

import pytest
import tiny_text
import torch
from tiny import tiny_tokenizer

from mla_convert.evaluation import retrieval
from mla_convert.evaluation.scoring import Windows, full_windows, head, hidden_states, score
from mla_convert.evaluation.suite import RetrievalSpec


@pytest.mark.parametrize("bos", [False, True])
@pytest.mark.parametrize("keys", [1, 4])
def test_probes_hide_the_number_where_they_say(bos: bool, keys: int) -> None:
    tokenizer = tiny_tokenizer()
    if bos:
        from tokenizers.processors import TemplateProcessing

        tokenizer.backend_tokenizer.post_processor = TemplateProcessing(single="<s> $A", special_tokens=[("<s>", 257)])
    filler = torch.full((4000,), tokenizer("x")["input_ids"][-1])
    spec = RetrievalSpec(keys=keys, lengths=(600, 90), depths=(0.0, 0.5, 1.0), trials=2)
    found, short = retrieval.probes(tokenizer, filler, spec)
    assert short == [90] and len(found) == 6
    for probe in found:
        assert len(probe.ids) == 600 and (int(probe.ids[0]) == 257) == bos
        text = tokenizer.decode(probe.ids, skip_special_tokens=True)
        prompt, number = text[:-6], text[-5:]
        assert prompt.endswith("The pass key of amber is") and number.isdecimal()
        hidden = f"The pass key of amber is {number}."
        assert text.count(hidden) == 1 and text.count("Remember it.") == keys
        before = text[: text.index(hidden)].count("x") / text.count("x")
        assert before == pytest.approx(probe.depth, abs=0.01)
    assert len({tokenizer.decode(probe.ids[-5:]) for probe in found}) > 1
    again, _ = retrieval.probes(tokenizer, filler, spec)
    assert all(torch.equal(a.ids, b.ids) for a, b in zip(found, again, strict=True))


def test_only_a_whole_right_answer_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that knows every next token is right; one that misses the last digit of one probe is right for half."""
    tokenizer, filler = tiny_tokenizer(), torch.full((999,), 7)
    found, _ = retrieval.probes(tokenizer, filler, RetrievalSpec(1, (200,), (0.5,), 2))
    identity = torch.nn.Linear(300, 300, bias=False)
    torch.nn.init.eye_(identity.weight)
    monkeypatch.setattr(retrieval, "head", lambda model: identity)

    def knowing(model: Any, windows: Windows, *_: Any, wrong: bool = False) -> torch.Tensor:
        seen = 50.0 * torch.nn.functional.one_hot(windows.targets, 300).float()
        if wrong:
            seen[-1] = 0.0
            seen[-1, 7] = 50.0
        return seen

    monkeypatch.setattr(retrieval, "hidden_states", knowing)
    (row,) = retrieval.retrieve(None, found, 1)  # type: ignore[arg-type]
    assert row["right"] == 1 and row["nll"] < 1e-6 and row["probes"] == 2
    monkeypatch.setattr(retrieval, "hidden_states", lambda *args: knowing(*args, wrong=True))
    (row,) = retrieval.retrieve(None, found, 1)  # type: ignore[arg-type]
    assert row["right"] == 0.5


def test_greedy_is_what_generate_gives() -> None:
    model = tiny_text.llama(2)
    model.generation_config.eos_token_id = None  # it counts as any other token
    prompts = torch.randint(3, 90, (3, 9), generator=torch.Generator().manual_seed(0))
    wanted = model.generate(prompts, max_new_tokens=7, do_sample=False, pad_token_id=0)[:, 9:]
    assert torch.equal(retrieval.greedy(model, prompts, 7), wanted)


def test_agreement_counts_up_to_the_first_difference() -> None:
    reference = torch.tensor([[1, 2, 3, 4], [5, 6, 7, 8]])
    own = torch.tensor([[1, 2, 9, 4], [5, 6, 7, 8]])
    assert retrieval.agreement_of(reference, own) == {"prefix": 0.75, "identical": 0.5}


def test_padded_scores_of_retrieval_are_those_of_each_probe_alone() -> None:
    """Batches hold equal lengths; the answers alone are scored: measured 0."""
    model = tiny_text.llama(1)
    ids = torch.randint(3, 90, (2, 30), generator=torch.Generator().manual_seed(0))
    found = [retrieval.Probe(30, 0.0, row, 4) for row in ids]
    (row,) = retrieval.retrieve(model, found, 2)
    windows = full_windows(ids)
    nll = score(head(model), hidden_states(model, windows, 1), windows.targets).nll.view(2, 29)[:, -4:]
    assert row["nll"] == pytest.approx(float(nll.mean()), abs=1e-6)
