"""Receipts as data."""

from __future__ import annotations

import json

import attrs
import pytest

from mixle_core import OwnerReceipt, StepReceipt

RECEIPT = StepReceipt(update=3, loss=0.5, num_local_tokens=10, num_local_examples=2, microbatches=1, committed=False)


def test_a_receipt_before_the_commit_has_no_results_of_the_update():
    assert (RECEIPT.num_tokens, RECEIPT.grad_norm, RECEIPT.clip_factor, RECEIPT.learning_rate, RECEIPT.skipped) == (None,) * 5
    assert RECEIPT.owners == ()


def test_a_receipt_is_json_with_its_owners():
    receipt = attrs.evolve(RECEIPT, committed=True, owners=(OwnerReceipt("alpha", 4, 2, 128),))
    assert json.loads(json.dumps(receipt.as_dict()))["owners"] == [
        {"owner": "alpha", "num_parameters": 4, "num_collectives": 2, "payload_bytes": 128}
    ]


def test_a_receipt_reads_as_one_line():
    assert str(RECEIPT) == "update 3, batch waiting: loss 0.5000 over 10 tokens of this rank"
    done = attrs.evolve(
        RECEIPT, committed=True, num_tokens=40, grad_norm=2.0, learning_rate=1e-3, owners=(OwnerReceipt("alpha", 4, 2, 4096),)
    )
    assert str(done) == "update 3: loss 0.5000 over 40 tokens, norm 2.0000, lr 1.00e-03; alpha: 2 collectives, 4,096 bytes"
    assert str(attrs.evolve(done, skipped="why", owners=())) == "update 3: loss 0.5000 over 40 tokens, SKIPPED (why)"


def test_a_receipt_is_frozen():
    with pytest.raises(attrs.exceptions.FrozenInstanceError):
        RECEIPT.loss = 1.0
