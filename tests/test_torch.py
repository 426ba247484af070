"""Every op, and function composed of ops, against its peer in PyTorch: values and all gradients, in float64."""

import pytest

from packtrain.devtools.check.check_cases import checkable_names
from tests import checks

check_peers = pytest.importorskip("benchmarks.check_peers")
pytestmark = pytest.mark.torch

# gradients of other ops: compared as those ops' gradients
NO_PEER = {
    "silu_back", "swiglu_back", "geglu_back", "soft_max_back", "rms_norm_back", "attention_back", "attention_back_sums",
    "cross_entropy_back", "weighted_rows_back",
    "group_rows",  # no f32 in it
    "rounded",  # rounding is not differentiable, and has no peer
    "matmul_rounded",
    "stored_sum", "matmul_stored",
    "dropout",  # another generator of random numbers
    "count_equal",  # no f32 in it
    "draw",  # another generator of random numbers
    "pool_2d_back", "short_conv_back", "short_conv_back_w", "ssm_scan_back", "ssm_scan_cells",
    "short_conv_states", "delta_rule_back", "delta_rule_cells",
    "opt_moments_adamw8bit", "opt_momentum8bit",
    "tiled", "tiled_back",  # PyTorch has none
    "opt_step_lbfgs", "lbfgs_dots",  # torch.optim.LBFGS as a whole is compared in test_lbfgs
}  # fmt: skip


def test_ops_without_a_peer_are_listed() -> None:
    assert {*checkable_names()} - check_peers.PEERS.keys() == NO_PEER


@pytest.mark.parametrize("name", sorted({*checkable_names()} - NO_PEER))
def test_pytorch_agrees(name: str) -> None:
    checks.assert_passed(check_peers.check_peers(name))
