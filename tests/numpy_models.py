"""Forward passes in float64, written from what is known of each architecture: they share no line with packtrain.

A model is the metadata and the tensors of its file; nothing comes from packtrain's own reading of it. Sources: the
papers of llama (arXiv 2302.13971), Mixtral (2401.04088), gemma 2 (2408.00118), YaRN (2309.00071), and llama.cpp.
"""

from collections.abc import Mapping
from typing import Any

import numpy as np

from tests import numpy_gemmas

Tensors = Mapping[str, np.ndarray]
HALVES = {
    "qwen2",
    "qwen3",
    "qwen2moe",
    "glm4moe",
    "olmoe",
    "gpt-oss",
    "qwen3moe",
    "gemma",
    "gemma2",
    "gemma3",
    "phi3",
    "olmo2",
    "seed_oss",
    "exaone4",
    "hunyuan-dense",
    "phi2",
    "starcoder2",
    "stablelm",
    "falcon",
    "nemotron",
    "lfm2",
    "lfm2moe",
    "falcon-h1",
}
DELTA_NETS = {"qwen3next", "qwen35", "qwen35moe"}
GEMMAS = {"gemma", "gemma2", "gemma3"}
UNGATED = {"phi2", "gpt2", "starcoder2", "falcon", "nemotron"}


class Model:
    """One model: `logits` of a text, `losses` of its tokens."""

    def __init__(self, metadata: Mapping[str, Any], tensors: Tensors, context: int) -> None:
        self.arch = metadata["general.architecture"]
        self.keys = {
            k.split(".", 1)[1]: v for k, v in metadata.items() if k.startswith(f"{self.arch}.")
        }
        self.w = {name: np.asarray(value, np.float64) for name, value in tensors.items()}
        self.width = self.keys["embedding_length"]
        self.heads = self.keys["attention.head_count"]
        self.kv = int(np.max(self.keys.get("attention.head_count_kv", self.heads)))
        self.head = self.keys.get("attention.key_length", self.width // self.heads)
        self.rope_width = self.keys.get("rope.dimension_count", self.head)
        self.original = self.keys.get(
            "rope.scaling.original_context_length", self.keys["context_length"]
        )
        self.long = context > self.original

    def hidden(self, tokens: np.ndarray) -> np.ndarray:
        """What the last norm gives (T, C) for one sequence of tokens (T,)."""
        if self.arch == "gemma3n":
            return numpy_gemmas.Gemma3n(self).hidden(tokens)
        if self.arch == "gemma4":
            return numpy_gemmas.Gemma4(self).hidden(tokens)
        h = self.w["token_embd.weight"][tokens]
        if self.arch in GEMMAS:
            h = h * np.sqrt(self.width)
        h = h * self.keys.get("embedding_scale", 1.0)
        if "position_embd.weight" in self.w:
            h = h + self.w["position_embd.weight"][: len(h)]
        first, second = "post_attention_norm", "ffn_norm"
        if self.arch in (
            *DELTA_NETS,
            "seed_oss",
            "glm4moe",
            "gpt-oss",
        ):  # it stands before the feed-forward
            first, second = "none", first
        share = self.keys.get("residual_scale", 1.0)
        for i in range(self.keys["block_count"]):
            x = self.after(i, "attn_norm", h)
            if self.is_parallel(i):
                y = self.attention(i, self.after(i, "attn_norm_2", h, x))
                h = h + y + self.feed_forward(i, x)
                continue
            y = self.mixed(i, x)
            h = h + share * self.after(i, first, y)
            y = self.feed_forward(i, self.after(i, second, h))
            h = h + share * self.after(i, "post_ffw_norm", y)
        return self.normed(h, "token_embd_norm" if "lfm2" in self.arch else "output_norm")

    def logits(self, tokens: np.ndarray) -> np.ndarray:
        """Logits (T, V) of one sequence of tokens (T,)."""
        head = self.w.get("output.weight", self.w["token_embd.weight"])
        y = self.hidden(tokens) @ head.T + self.w.get("output.bias", 0.0)
        scale = self.keys.get("logit_scale", 1.0)
        y = y * scale if self.arch == "cohere2" else y / scale
        return capped(
            y, self.keys.get("final_logit_softcapping", 30.0 if self.arch == "gemma2" else 0.0)
        )

    def losses(self, ids: np.ndarray) -> np.ndarray:
        """Negative log-likelihoods (T,) of ids[1:], each after those before it; ids (T + 1,)."""
        logits = self.logits(ids[:-1])
        top = logits.max(axis=-1, keepdims=True)
        total = np.log(np.exp(logits - top).sum(axis=-1)) + top[:, 0]
        return total - np.take_along_axis(logits, ids[1:, None], axis=1)[:, 0]

    def normed(self, x: np.ndarray, name: str) -> np.ndarray:
        if "attention.layer_norm_epsilon" in self.keys:
            x, eps = x - x.mean(-1, keepdims=True), self.keys["attention.layer_norm_epsilon"]
        else:
            eps = self.keys["attention.layer_norm_rms_epsilon"]
        y = (
            x
            / np.sqrt(np.mean(x**2, axis=-1, keepdims=True) + eps)
            * self.w.get(f"{name}.weight", self.w.get(name))
        )
        return y + self.w.get(f"{name}.bias", 0.0)

    def eps(self) -> float:
        return float(self.keys["attention.layer_norm_rms_epsilon"])

    def after(
        self, i: int, name: str, x: np.ndarray, fallback: np.ndarray | None = None
    ) -> np.ndarray:
        if f"blk.{i}.{name}.weight" in self.w or f"blk.{i}.{name}" in self.w:
            return self.normed(x, f"blk.{i}.{name}")
        return x if fallback is None else fallback

    def is_parallel(self, i: int) -> bool:
        """Whether attention and feed-forward stand side by side."""
        if self.arch == "stablelm":
            return f"blk.{i}.ffn_norm.weight" not in self.w
        return self.arch in ("phi2", "falcon", "cohere2")

    def linear(self, i: int, name: str, x: np.ndarray) -> np.ndarray:
        return x @ self.w[f"blk.{i}.{name}.weight"].T + self.w.get(f"blk.{i}.{name}.bias", 0)

    # ---- attention

    def mixed(self, i: int, x: np.ndarray) -> np.ndarray:
        """What a block's tokens get of those before them."""
        y = self.attention(i, x) if f"blk.{i}.attn_output.weight" in self.w else np.zeros_like(x)
        if f"blk.{i}.shortconv.conv.weight" in self.w:
            y = self.convolved(i, x)
        if f"blk.{i}.attn_gate.weight" in self.w:
            y = self.ruled(i, x)
        return y + (self.scanned(i, x) if f"blk.{i}.ssm_in.weight" in self.w else 0)

    def scanned(self, i: int, x: np.ndarray) -> np.ndarray:
        """Mamba-2, token by token."""
        inner, n, heads, groups, taps = (
            self.keys[f"ssm.{key}"]
            for key in ("inner_size", "state_size", "time_step_rank", "group_count", "conv_kernel")
        )
        wide, p = inner + 2 * groups * n, inner // heads
        z, x, steps = np.split(self.linear(i, "ssm_in", x), [inner, inner + wide], axis=-1)
        padded = np.concatenate([np.zeros((taps - 1, wide)), x])
        filters, a, skip = (
            self.w[f"blk.{i}.{part}"] for part in ("ssm_conv1d.weight", "ssm_a", "ssm_d")
        )
        state, ys = np.zeros((heads, p, n)), []
        for t in range(len(x)):
            u = (padded[t : t + taps] * filters.T).sum(0) + self.w[f"blk.{i}.ssm_conv1d.bias"]
            u = u / (1 + np.exp(-u))
            values, b, c = np.split(u, [inner, inner + groups * n])
            values = values.reshape(heads, p)
            b, c = (np.repeat(part.reshape(groups, n), heads // groups, axis=0) for part in (b, c))
            delta = np.log1p(np.exp(steps[t] + self.w[f"blk.{i}.ssm_dt.bias"]))[:, None]
            decay = np.exp(delta * a)[..., None]
            state = decay * state + (delta * values)[..., None] * b[:, None]
            ys.append(((state * c[:, None]).sum(-1) + skip * values).reshape(-1))
        y = np.array(ys) * z / (1 + np.exp(-z))
        if f"blk.{i}.ssm_norm.weight" in self.w:
            y = self.normed(y.reshape(len(y), groups, -1), f"blk.{i}.ssm_norm").reshape(len(y), -1)
        return self.linear(i, "ssm_out", y)

    def ruled(self, i: int, x: np.ndarray) -> np.ndarray:
        """A gated delta net, token by token: arXiv 2412.06464, and llama.cpp's qwen3next.cpp and qwen35.cpp."""
        n, heads, groups, taps = (
            self.keys[f"ssm.{key}"]
            for key in ("state_size", "time_step_rank", "group_count", "conv_kernel")
        )
        if f"blk.{i}.ssm_ba.weight" in self.w:
            both = self.linear(i, "ssm_ba", x).reshape(len(x), groups, 2, heads // groups)
            b, a = (both[:, :, k].reshape(len(x), heads) for k in (0, 1))
            group = np.arange(heads) // (heads // groups)
        else:
            b, a, group = (
                *(self.linear(i, f"ssm_{k}", x) for k in ("beta", "alpha")),
                np.arange(heads) % groups,
            )
        z, x = self.linear(i, "attn_gate", x), self.linear(i, "attn_qkv", x)
        padded = np.concatenate([np.zeros((taps - 1, x.shape[1])), x])
        beta = 1 / (1 + np.exp(-b))
        steps = np.log1p(np.exp(a + self.w[f"blk.{i}.ssm_dt.bias"]))
        state, ys = np.zeros((heads, n, n)), []
        for t in range(len(x)):
            u = (padded[t : t + taps] * self.w[f"blk.{i}.ssm_conv1d.weight"].T).sum(0)
            q, k, v = np.split(u / (1 + np.exp(-u)), [groups * n, 2 * groups * n])
            q, k = (part.reshape(groups, n)[group] for part in (q, k))
            q, k = (
                part / np.sqrt((part**2).sum(-1, keepdims=True) + self.eps()) for part in (q, k)
            )
            state = state * np.exp(steps[t] * self.w[f"blk.{i}.ssm_a"])[:, None, None]
            wrong = v.reshape(heads, n) - np.einsum("hpn,hn->hp", state, k)
            state = state + np.einsum("h,hp,hn->hpn", beta[t], wrong, k)
            ys.append(np.einsum("hpn,hn->hp", state, q) / np.sqrt(n))
        y = self.normed(np.array(ys), f"blk.{i}.ssm_norm").reshape(len(x), -1)
        return self.linear(i, "ssm_out", y * z / (1 + np.exp(-z)))

    def convolved(self, i: int, x: np.ndarray) -> np.ndarray:
        """Token by token, from the last inputs."""
        taps = self.w[f"blk.{i}.shortconv.conv.weight"].T
        b, c, x = np.split(self.linear(i, "shortconv.in_proj", x), 3, axis=-1)
        last = np.zeros_like(taps)
        y = np.empty_like(x)
        for t in range(len(x)):
            last = np.concatenate([last[1:], (b[t] * x[t])[None]])
            y[t] = c[t] * (last * taps).sum(axis=0)
        return self.linear(i, "shortconv.out_proj", y)

    def latent(self, i: int, x: np.ndarray) -> np.ndarray:
        """Attention whose keys and values come from one narrow vector: deepseek2.cpp, without absorption."""
        rank, legacy = self.keys["attention.kv_lora_rank"], f"blk.{i}.attn_kv_b.weight" in self.w
        suffix = "" if legacy else "_mla"
        d, wide = (self.keys[f"attention.{n}_length{suffix}"] for n in ("key", "value"))
        nope_width, time = d - self.rope_width, len(x)
        if "attention.q_lora_rank" in self.keys:
            q = self.after(i, "attn_q_a_norm", self.linear(i, "attn_q_a", x))
            q = self.linear(i, "attn_q_b", q)
        else:
            q = self.linear(i, "attn_q", x)
        q = q.reshape(time, self.heads, d)
        both = self.linear(i, "attn_kv_a_mqa", x)
        c, k_turned = both[:, :rank], self.rotated(i, both[:, None, rank:])[:, 0]
        c = self.after(i, "attn_kv_a_norm", c)
        q_turned = self.rotated(i, q[..., nope_width:])
        if legacy:
            keys, values = np.split(
                self.linear(i, "attn_kv_b", c).reshape(time, self.heads, -1), [nope_width], axis=-1
            )
        else:
            keys = np.einsum("tr,hrn->thn", c, self.w[f"blk.{i}.attn_k_b.weight"])
            values = np.einsum("tr,hvr->thv", c, self.w[f"blk.{i}.attn_v_b.weight"])
        scores = np.einsum("thn,shn->hts", q[..., :nope_width], keys)
        scores += np.einsum("thr,sr->hts", q_turned, k_turned)
        factor = self.keys.get("rope.scaling.factor", 1.0)
        multiplier = self.keys.get("rope.scaling.yarn_log_multiplier", 0.0)  # a tenth of it
        growth = self.angles(i)[1] * (1 + multiplier * np.log(factor))
        if self.keys.get("rope.scaling.type") == "linear":
            growth *= 1 + 0.1 * np.log(factor)
        scores *= growth**2 / np.sqrt(d)
        scores[:, np.arange(time)[:, None] < np.arange(time)] = -np.inf
        e = np.exp(scores - scores.max(axis=-1, keepdims=True))
        y = np.einsum("hts,shv->thv", e / e.sum(axis=-1, keepdims=True), values)
        return self.linear(i, "attn_output", y.reshape(time, self.heads * wide))

    def attention(self, i: int, x: np.ndarray) -> np.ndarray:
        if "attention.kv_lora_rank" in self.keys:
            return self.latent(i, x)
        time, sizes = len(x), np.array([self.heads, self.kv, self.kv]) * self.head
        if f"blk.{i}.attn_qkv.weight" in self.w:
            parts = np.split(self.linear(i, "attn_qkv", x), np.cumsum(sizes)[:2], axis=-1)
        else:
            parts = [self.linear(i, f"attn_{name}", x) for name in "qkv"]
        gate = None
        if parts[0].shape[-1] == 2 * self.heads * self.head:
            parts[0], gate = np.split(parts[0].reshape(time, self.heads, -1), 2, axis=-1)
        if self.arch in ("olmo2", "olmoe"):
            parts[:2] = (self.after(i, f"attn_{x}_norm", parts["qk".index(x)]) for x in "qk")
        q, k, v = (part.reshape(time, -1, self.head) for part in parts)
        norm_after_rope = self.arch == "hunyuan-dense"
        if self.arch not in ("olmo2", "olmoe") and not norm_after_rope:
            q, k = self.after(i, "attn_q_norm", q), self.after(i, "attn_k_norm", k)
        if self.turns(i):
            q, k = self.rotated(i, q), self.rotated(i, k)
        if self.arch == "llama4" and self.turns(i):
            q, k = (x / np.sqrt((x**2).mean(-1, keepdims=True) + self.eps()) for x in (q, k))
        elif self.arch == "llama4":
            number = (np.arange(time) + 1) // self.keys["attention.sliding_window"]
            q = q * (1 + 0.1 * np.log(1 + number))[:, None, None]
        if norm_after_rope:
            q, k = self.after(i, "attn_q_norm", q), self.after(i, "attn_k_norm", k)
        warmth = self.keys.get("attention.temperature_scale", 0.0)
        q = q * (1 + warmth * np.log(1 + np.arange(time) // self.original))[:, None, None]
        distance = np.arange(time)[:, None] - np.arange(time)
        hidden = (distance < 0) | (distance >= self.window(i))
        if self.arch == "llama4":
            chunk = np.arange(time) // self.window(i)
            hidden = (distance < 0) | (chunk[:, None] != chunk)
        y = np.empty_like(q)
        for head in range(self.heads):
            group = head // (self.heads // self.kv)
            scores = capped(q[:, head] @ k[:, group].T * self.scale(), self.score_cap())
            sink = self.w.get(f"blk.{i}.attn_sinks.weight", np.full(self.heads, -np.inf))[head]
            top = np.maximum(scores.max(axis=-1, keepdims=True), sink)
            e = np.exp(np.where(hidden, -np.inf, scores - top))
            y[:, head] = e / (e.sum(axis=-1, keepdims=True) + np.exp(sink - top)) @ v[:, group]
        if gate is not None:
            y = y / (1 + np.exp(-gate))
        return self.linear(i, "attn_output", y.reshape(time, -1))

    def turns(self, i: int) -> bool:
        """Whether a block has rope."""
        if self.keys.get("rope.scaling.finetuned") is False:
            return False
        if self.arch in ("smollm3", "gpt2", "llama4"):
            return self.arch != "gpt2" and i % 4 != 3
        large = self.arch == "exaone4" and self.keys["block_count"] == 64
        return self.local(i) if self.arch == "cohere2" or large else True

    def scale(self) -> float:
        if "attention.scale" in self.keys:
            return float(self.keys["attention.scale"])
        largest = {"gemma2": 46, "gemma3": 62}.get(self.arch) == self.keys["block_count"]
        return float((self.width / self.heads if largest else self.head) ** -0.5)

    def score_cap(self) -> float:
        return self.keys.get("attn_logit_softcapping", 50.0) if self.arch == "gemma2" else 0.0

    def local(self, i: int) -> bool:
        """Whether a block sees a window only."""
        pattern = self.keys.get(
            "attention.sliding_window_pattern",
            {"gemma2": 2, "gpt-oss": 2, "gemma3": 6}.get(self.arch, 4),
        )
        if np.ndim(pattern):
            return bool(pattern[i])
        window_archs = ("gemma2", "gemma3", "cohere2", "olmo2", "exaone4", "gpt-oss", "llama4")
        has_window = self.arch in window_archs and self.keys.get("attention.sliding_window", 0)
        return bool(has_window) and (i + 1) % pattern != 0

    def window(self, i: int) -> float:
        return self.keys["attention.sliding_window"] if self.local(i) else np.inf

    # ---- rope

    def rotated(self, i: int, x: np.ndarray) -> np.ndarray:
        """Turn the first elements of each head of x (T, heads, D), as complex numbers, by their position."""
        n = self.rope_width // 2
        angle, growth = self.angles(i)
        turn = growth * np.exp(1j * np.arange(len(x))[:, None] * angle)[:, None]
        if self.arch in HALVES | DELTA_NETS:
            pairs = (x[..., :n] + 1j * x[..., n : 2 * n]) * turn
            turned_pairs = np.concatenate([pairs.real, pairs.imag], axis=-1)
        else:
            pairs = (x[..., 0 : 2 * n : 2] + 1j * x[..., 1 : 2 * n : 2]) * turn
            turned_pairs = np.stack([pairs.real, pairs.imag], axis=-1).reshape(*x.shape[:-1], 2 * n)
        return np.concatenate([turned_pairs, x[..., 2 * n :]], axis=-1)

    def angles(self, i: int) -> tuple[np.ndarray, float]:
        """Turn of each pair from one position to the next, and what rope multiplies lengths by."""
        n, local = self.rope_width // 2, self.arch == "gemma3" and self.local(i)
        if self.arch == "olmo2" and self.local(i):
            return self.keys["rope.freq_base"] ** (-np.arange(n) / n), 1.0
        base = (
            self.keys.get("rope.freq_base_swa", 1e4)
            if local
            else self.keys.get("rope.freq_base", 1e4)
        )
        factor = 1.0 if local else self.keys.get("rope.scaling.factor", 1.0)
        growth = self.keys.get("rope.scaling.attn_factor", 1.0)
        factors = self.w.get(f"rope_factors_{'long' if self.long else 'short'}.weight", 1.0)
        angle = base ** (-np.arange(n) / n) / self.w.get("rope_freqs.weight", factors)
        if self.keys.get("rope.scaling.type") != "yarn":
            return angle / factor, growth
        fast = self.keys.get("rope.scaling.yarn_beta_fast", 32.0)
        slow = self.keys.get("rope.scaling.yarn_beta_slow", 1.0)
        places = n * np.log(self.original / (2 * np.pi * np.array([fast, slow]))) / np.log(base)
        first, last = max(np.floor(places[0]), 0), min(np.ceil(places[1]), 2 * n - 1)
        share = np.clip((np.arange(n) - first) / max(last - first, 1e-3), 0, 1)
        multiplier = self.keys.get("rope.scaling.yarn_log_multiplier", 0.0)
        if self.arch == "deepseek2" and multiplier:
            return angle * (1 - share + share / factor), growth
        growth *= 1 + 0.1 * np.log(factor)
        return angle * (1 - share + share / factor), growth / (
            1 + 0.1 * multiplier * np.log(factor)
        )

    # ---- feed-forward

    def feed_forward(self, i: int, x: np.ndarray) -> np.ndarray:
        if f"blk.{i}.ffn_gate_inp.weight" in self.w:
            return self.experts(i, x)
        if self.arch in UNGATED:
            return self.linear(i, "ffn_down", self.activated(self.linear(i, "ffn_up", x)))
        if self.arch in ("phi3", "glm4"):
            gate, up = np.split(self.linear(i, "ffn_up", x), 2, axis=-1)
        else:
            gate, up = self.linear(i, "ffn_gate", x), self.linear(i, "ffn_up", x)
        return self.linear(i, "ffn_down", self.activated(gate) * up)

    def activated(self, gate: np.ndarray) -> np.ndarray:
        if self.arch == "nemotron":
            return np.maximum(gate, 0) ** 2
        if self.arch in GEMMAS | UNGATED:
            return gate / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (gate + 0.044715 * gate**3)))
        return gate / (1 + np.exp(-gate))

    def experts(self, i: int, x: np.ndarray) -> np.ndarray:
        logits = self.linear(i, "ffn_gate_inp", x)
        p = np.exp(logits) / np.exp(logits).sum(axis=-1, keepdims=True)
        if (
            self.arch in ("glm4moe", "lfm2moe", "llama4")
            or self.keys.get("expert_gating_func") == 2
        ):
            p = 1 / (1 + np.exp(-logits))
        selection_scores = p + self.w.get(f"blk.{i}.exp_probs_b.bias", 0)
        if (groups := self.keys.get("expert_group_count", 1)) > 1:
            grouped_scores = selection_scores.reshape(len(x), groups, -1)
            best = np.argsort(-np.sort(grouped_scores)[..., -2:].sum(-1))[
                :, : self.keys["expert_group_used_count"]
            ]
            out = np.ones((len(x), groups), bool)
            np.put_along_axis(out, best, False, axis=1)
            selection_scores = np.where(out[..., None], -np.inf, grouped_scores).reshape(
                selection_scores.shape
            )
        y = np.zeros_like(x)
        for t in range(len(x)):
            chosen = np.argsort(-selection_scores[t])[: self.keys["expert_used_count"]]
            is_unnormalized = self.arch in ("qwen2moe", "olmoe", "llama4") or (
                self.arch in ("glm4moe", "deepseek2") and not self.keys.get("expert_weights_norm")
            )
            total = 1 if is_unnormalized else p[t, chosen].sum()
            for e in chosen:
                share = p[t, e] / total * self.keys.get("expert_weights_scale", 1.0)
                if self.arch == "llama4":
                    y[t] += self.expert(i, int(e), share * x[t])
                else:
                    y[t] += share * self.expert(i, int(e), x[t])
        return y + self.shared_expert(i, x)

    def expert(self, i: int, e: int, x: np.ndarray) -> np.ndarray:
        gate, up, down = (self.w[f"blk.{i}.ffn_{n}_exps.weight"][e] for n in ("gate", "up", "down"))
        if self.arch == "gpt-oss":
            biases = (self.w[f"blk.{i}.ffn_{n}_exps.bias"][e] for n in ("gate", "up", "down"))
            to_gate, to_up, to_down = biases
            g, u = np.minimum(gate @ x + to_gate, 7), np.clip(up @ x + to_up, -7, 7)
            return down @ (g / (1 + np.exp(-1.702 * g)) * (u + 1)) + to_down
        return down @ (self.activated(gate @ x) * (up @ x))

    def shared_expert(self, i: int, x: np.ndarray) -> np.ndarray | float:
        if f"blk.{i}.ffn_up_shexp.weight" not in self.w:
            return 0.0
        gate, up = (self.linear(i, f"ffn_{name}_shexp", x) for name in ("gate", "up"))
        y = self.linear(i, "ffn_down_shexp", self.activated(gate) * up)
        if f"blk.{i}.ffn_gate_inp_shexp.weight" in self.w:
            y = y / (1 + np.exp(-x @ self.w[f"blk.{i}.ffn_gate_inp_shexp.weight"]))[:, None]
        return y


def capped(x: np.ndarray, cap: float) -> np.ndarray:
    return cap * np.tanh(x / cap) if cap else x
