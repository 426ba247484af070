"""Cuts of sampler chains: the graph runs the first samplers on the device (see ops.choosing), the host finishes. No
other module decides where a chain is cut."""

from dataclasses import dataclass, replace

from packtrain.inference.sampling.sampling_settings import Sampling

MAX_CANDIDATES = 128  # candidates of a row that a graph finds
LOGITS, CANDIDATES, TOKEN = "logits", "candidates", "token"
GRAPH_SAMPLERS = "top_k", "top_p", "min_p", "temperature"  # as the graph applies them
GREEDY = {*GRAPH_SAMPLERS, "top_n_sigma", "tfs_z"}  # none of these drops the likeliest token
SEEDS = 1 << 63


@dataclass(frozen=True, slots=True)
class SamplerCut:
    """The cut of a chain: what leaves the device for a row of logits, and settings of the graph's samplers.

    numbers       temperature, top-p, min-p
    int_settings  top-k, seed, index of the token in its text
    """

    leaves: str = LOGITS
    numbers: tuple[float, float, float] = (0.0, 1.0, 0.0)
    int_settings: tuple[int, int, int] = (1, 0, 0)


def token_cut(base: SamplerCut, s: Sampling, seed: int, index: int) -> SamplerCut:
    """Return the cut for token `index` of a text: `base`, with seed and index if it draws; large seeds: candidates."""
    if base.leaves != TOKEN or base.numbers[0] <= 0:  # no draw
        return base
    if seed >= SEEDS:
        return SamplerCut(CANDIDATES)
    return replace(base, int_settings=(s.top_k, seed, index))


def base_cut(s: Sampling) -> SamplerCut:
    """Return the cut with these settings, not yet for a token: the graph runs as many samplers as it can."""
    biases = s.biases.values()
    if s.mirostat or any(bias > 0 for bias in biases):
        return SamplerCut()
    # biases may lower as many candidates, so that as many more must leave the device
    max_top_k = MAX_CANDIDATES - len(biases)
    active = [name for name in s.order if not _is_idle(s, name)]
    is_fixed_temp = s.dynatemp_range <= 0
    if "temperature" in active and is_fixed_temp and s.temp <= 0 and GREEDY.issuperset(active):
        if max_top_k < 1:
            return SamplerCut()
        return SamplerCut(CANDIDATES if biases else TOKEN)
    # min-p needs the largest only
    limiting_sampler = next((name for name in active if name != "min_p"), "")
    if limiting_sampler != "top_k" or s.top_k > max_top_k:
        return SamplerCut()
    if biases or active != [name for name in GRAPH_SAMPLERS if name in active] or not is_fixed_temp:
        return SamplerCut(CANDIDATES)
    temp = s.temp if "temperature" in active else 1.0
    top_p = s.top_p if "top_p" in active else 1.0
    return SamplerCut(TOKEN, (temp, top_p, s.min_p if "min_p" in active else 0.0))


def _is_idle(s: Sampling, sampler_name: str) -> bool:
    """Return whether a sampler does nothing with these settings."""
    penalties = s.repeat_penalty, s.frequency_penalty, s.presence_penalty
    return {
        "penalties": penalties == (1, 0, 0), "dry": not s.dry_multiplier, "top_n_sigma": s.top_n_sigma <= 0,
        "top_k": not s.top_k, "tfs_z": s.tfs >= 1, "typ_p": s.typical >= 1, "top_p": s.top_p >= 1,
        "min_p": s.min_p <= 0, "xtc": s.xtc_probability <= 0 or s.xtc_threshold > 0.5,
    }.get(sampler_name, False)  # fmt: skip
