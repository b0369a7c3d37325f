"""Every kind of fault is named from values alone, with its ratio; values that fit none are not explained."""

from __future__ import annotations

import pytest
import torch

from mixle_core.audit import KINDS, classify
from mixle_core.audit.classify import default_groups


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


WHOLE = draw(4, 3)
TERMS = [draw(4, 3, seed=1), WHOLE - draw(4, 3, seed=1)]
SINGLE = [draw(4, 3, seed=n) for n in range(2, 5)]
SUM = SINGLE[0] + SINGLE[1] + SINGLE[2]
AGAIN = 4 * SINGLE[0] + 2 * SINGLE[1] + SINGLE[2]


def one(seen, wanted=WHOLE, **options):
    return classify(seen, [wanted] * len(seen), **options)


@pytest.mark.parametrize(
    ("seen", "kind", "ratio", "said"),
    [
        ([WHOLE, WHOLE], "right", 1.0, ""),
        ([WHOLE, WHOLE * (1 + 1e-6)], "right", 1.0, ""),
        ([2 * WHOLE, 2 * WHOLE], "reduced twice", 2.0, "2 times the reference on every rank"),
        ([WHOLE / 2, WHOLE / 2], "averaged instead of summed", 0.5, "1/2 of the reference"),
        ([3 * WHOLE, 3 * WHOLE], "scaled by a constant", 3.0, "3 times the reference"),
        ([-WHOLE, -WHOLE], "scaled by a constant", -1.0, "-1 times the reference"),
        (TERMS, "missing sum", None, "the values of ranks 0,1 add up to the reference"),
        ([2 * TERMS[0], 2 * TERMS[1]], "missing sum", None, "the values of ranks 0,1 average to the reference"),
        ([WHOLE, WHOLE + 0.1], "copies drifting apart", 1.0, "ranks 0 and 1 differ by"),
        ([None, None], "never trained", None, "no rank has a gradient"),
        ([WHOLE, None], "never trained", None, "rank 1 has no gradient"),
        ([draw(4, 3, seed=9)] * 2, "not explained", None, "relative errors of the ranks"),
    ],
    ids=lambda value: value if isinstance(value, str) and value in KINDS else "",
)
def test_a_fault_of_two_ranks_has_its_name(seen, kind, ratio, said):
    verdict = one(seen)
    assert verdict.kind == kind
    assert said in verdict.evidence
    if ratio is not None:
        assert verdict.ratio == pytest.approx(ratio, rel=1e-5)


@pytest.mark.parametrize("divided", [1.0, 3.0])
def test_a_gradient_that_is_reduced_again_at_every_microbatch(divided):
    """However the loop divides by the number of microbatches."""
    verdict = one([AGAIN / divided] * 2, SUM / divided, single=[[term, term] for term in SINGLE])
    assert (verdict.kind, verdict.evidence.split(" times")[0]) == ("reduced again at every microbatch", "microbatches count 4, 2, 1")


def test_it_takes_the_microbatches_to_tell():
    assert one([AGAIN, AGAIN], SUM).kind == "not explained"


def test_sums_over_some_of_the_ranks_name_them():
    seen = [TERMS[0], TERMS[0], TERMS[1], TERMS[1]]
    assert "ranks 0,2 | 1,3 add up" in one(seen).evidence
    assert "ranks tp add up" in one(seen, groups={"dp": [[0, 1], [2, 3]], "tp": [[0, 2], [1, 3]]}).evidence
    assert one(seen, groups={"dp": [[0, 1], [2, 3]]}).kind == "copies drifting apart"


def test_slices_are_compared_each_with_its_own():
    pieces = WHOLE.chunk(2)
    assert classify(pieces, pieces).kind == "right"
    assert classify([2 * piece for piece in pieces], pieces).kind == "reduced twice"
    assert classify([pieces[0], 2 * pieces[1]], pieces).kind == "not explained"


def test_what_one_process_does_not_train():
    assert classify([None, None], [None, None]).kind == "right"
    assert "rank 1 has a gradient, one process has none" in classify([None, WHOLE], [None, None]).evidence


def test_non_finite_values_are_not_right():
    assert one([WHOLE, torch.full_like(WHOLE, float("nan"))]).kind != "right"


def test_the_groups_of_four_ranks():
    assert set(default_groups(4)) == {"0,1 | 2,3", "0,2 | 1,3", "0,1,2,3"}


def test_one_assembled_gradient_has_a_cause_whatever_the_axes():
    verdict = classify([draw(4, 3, seed=9)], [WHOLE], groups={"tp": [[0, 1]]})
    assert verdict.kind == "not explained"
    assert classify([2 * WHOLE], [WHOLE], groups={"tp": [[0, 1]]}).kind == "reduced twice"


def lost(size: float, to: float = 0.0) -> torch.Tensor:
    """Ten rows like the first, and one of that size, which becomes `to` of itself on one rank."""
    table = torch.cat([draw(1, 4).expand(10, 4), size * draw(1, 4)])
    return torch.cat([table[:10], to * table[10:]])


def test_a_row_that_a_rank_lost_is_found_beside_rows_that_dwarf_it():
    verdict = classify([lost(1e-5, 1.0), lost(1e-5)], [lost(1e-5, 1.0)] * 2)
    assert (verdict.kind, verdict.error, verdict.evidence) == ("not explained", 1.0, "row 10 is zero on rank 1, and is not in one process")


def test_rounding_is_no_lost_row():
    assert classify([lost(1e-7)], [lost(1e-7, 1.0)]).kind == "right"  # what cancels to zeros in one order and not in another
    assert classify([lost(1e-5, 0.5)], [lost(1e-5, 1.0)]).kind == "right"  # only zeros are told from rounding there
    assert classify([lost(1e-7, 1.0)], [lost(1e-7)]).kind == "right"
    assert classify([torch.tensor([1.0, 0.0])], [torch.tensor([1.0, 1e-5])]).kind == "right"  # a vector has no rows
    assert classify([torch.zeros(2, 3)], [torch.zeros(2, 3)]).kind == "right"
