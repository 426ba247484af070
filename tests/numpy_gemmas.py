"""Forward passes of Gemma 3n and 4 in float64, from llama.cpp's sources and transformers: see numpy_models."""

from typing import Any

import numpy as np


def gelu(x: np.ndarray) -> np.ndarray:
    return x / 2 * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3)))


class Gemma4:
    """A model by its keys and weights; `whole` has norms and products by name."""

    def __init__(self, model: Any) -> None:
        self.m, self.keys, self.w = model, model.keys, model.w
        self.blocks, self.heads = self.keys["block_count"], model.heads
        self.kv_by_block: dict[int, tuple[np.ndarray, np.ndarray]] = {}

    def has_window(self, i: int) -> bool:
        return bool(self.keys["attention.sliding_window_pattern"][i])

    def shared(self) -> int:
        """How many last blocks have keys and values of others."""
        return int(self.keys["attention.shared_kv_layers"])

    def hidden(self, tokens: np.ndarray) -> np.ndarray:
        m, w, embedding_width = self.m, self.w, self.keys["embedding_length_per_layer_input"]
        h = w["token_embd.weight"][tokens] * np.sqrt(m.width)
        if embedding_width:
            rows = w["per_layer_token_embd.weight"][tokens].reshape(
                len(h), self.blocks, embedding_width
            )
            projected = (h @ w["per_layer_model_proj.weight"].T / np.sqrt(m.width)).reshape(
                rows.shape
            )
            inputs = (
                m.normed(projected, "per_layer_proj_norm") + rows * np.sqrt(embedding_width)
            ) / np.sqrt(2)
        for i in range(self.blocks):
            y = self.attention(i, m.after(i, "attn_norm", h))
            h = h + m.after(i, "post_attention_norm", y)
            h = h + m.after(i, "post_ffw_norm", self.feed_forward(i, h))
            if embedding_width:
                y = gelu(m.linear(i, "inp_gate", h)) * inputs[:, i]
                h = h + m.after(i, "post_norm", m.linear(i, "proj", y))
            h = h * w.get(f"blk.{i}.layer_output_scale.weight", 1.0)
        return m.normed(h, "output_norm")

    def feed_forward(self, i: int, h: np.ndarray) -> np.ndarray:
        m, x, at = self.m, self.m.after(i, "ffn_norm", h), f"blk.{i}"
        y = m.linear(i, "ffn_down", gelu(m.linear(i, "ffn_gate", x)) * m.linear(i, "ffn_up", x))
        if f"{at}.ffn_gate_inp.weight" not in self.w:
            return y
        router_input = self.unscaled_norm(h) / np.sqrt(m.width) * self.w[f"{at}.ffn_gate_inp.scale"]
        p = np.exp(m.linear(i, "ffn_gate_inp", router_input))
        expert_input, z = m.after(i, "pre_ffw_norm_2", h), np.zeros_like(h)
        for t in range(len(h)):
            chosen = np.argsort(-p[t])[: self.keys["expert_used_count"]]
            for e in chosen:
                gate, up = np.split(self.w[f"{at}.ffn_gate_up_exps.weight"][e], 2)
                expert_output = self.w[f"{at}.ffn_down_exps.weight"][e] @ (
                    gelu(gate @ expert_input[t]) * (up @ expert_input[t])
                )
                z[t] += (
                    p[t, e]
                    / p[t, chosen].sum()
                    * expert_output
                    * self.w[f"{at}.ffn_down_exps.scale"][e]
                )
        return m.after(i, "post_ffw_norm_1", y) + m.after(i, "post_ffw_norm_2", z)

    def unscaled_norm(self, x: np.ndarray) -> np.ndarray:
        return x / np.sqrt((x**2).mean(-1, keepdims=True) + self.m.eps())

    def attention(self, i: int, x: np.ndarray) -> np.ndarray:
        m, time, is_local = self.m, len(x), self.has_window(i)
        d = self.keys.get("attention.key_length_swa", m.head) if is_local else m.head
        q = m.after(i, "attn_q_norm", m.linear(i, "attn_q", x).reshape(time, -1, d))
        num_unshared = self.blocks - self.shared()
        if i < num_unshared:
            k = m.linear(i, "attn_k", x).reshape(time, -1, d)
            v = m.linear(i, "attn_v", x) if f"blk.{i}.attn_v.weight" in self.w else k
            k = self.rotate(is_local, m.after(i, "attn_k_norm", k))
            self.kv_by_block[i] = k, self.unscaled_norm(v.reshape(k.shape))
        k, v = self.kv_by_block[
            i if i < num_unshared else num_unshared - 2 if is_local else num_unshared - 1
        ]
        q, shared = self.rotate(is_local, q), q.shape[1] // k.shape[1]
        distance = np.arange(time)[:, None] - np.arange(time)
        hidden = (distance < 0) | (is_local & (distance >= self.keys["attention.sliding_window"]))
        y = np.empty_like(q)
        for head in range(q.shape[1]):
            scores = np.where(hidden, -np.inf, q[:, head] @ k[:, head // shared].T)
            e = np.exp(scores - scores.max(-1, keepdims=True))
            y[:, head] = e / e.sum(-1, keepdims=True) @ v[:, head // shared]
        return m.linear(i, "attn_output", y.reshape(time, -1))

    def rotate(self, is_local: bool, x: np.ndarray) -> np.ndarray:
        n = x.shape[-1] // 2
        base = self.keys["rope.freq_base_swa" if is_local else "rope.freq_base"]
        angle = base ** (-np.arange(n) / n)
        if not is_local:
            angle = angle / self.w.get("rope_freqs.weight", 1.0)
            angle[int(self.keys.get("rope.turned", 1.0) * n) :] *= "rope.turned" not in self.keys
        turn = np.exp(1j * np.arange(len(x))[:, None] * angle)[:, None]
        pairs = (x[..., :n] + 1j * x[..., n:]) * turn
        return np.concatenate([pairs.real, pairs.imag], axis=-1)


class Gemma3n(Gemma4):
    """Its first blocks have sparse gates; streams (4, T, C)."""

    def shared(self) -> int:
        return max(self.blocks - 20, 0)

    def hidden(self, tokens: np.ndarray) -> np.ndarray:
        m, w, p = self.m, self.w, 256
        x = w["token_embd.weight"][tokens] * np.sqrt(m.width)
        rows = w["per_layer_token_embd.weight"][tokens].reshape(len(x), self.blocks, p)
        projected = (x @ w["per_layer_model_proj.weight"].T / np.sqrt(m.width)).reshape(rows.shape)
        inputs = (m.normed(projected, "per_layer_proj_norm") + rows * np.sqrt(p)) / np.sqrt(2)
        h = np.stack([x, *(sized(x @ a.T, x) for a in w["altup_proj.weight"])])
        for i in range(self.blocks):
            rates = m.linear(i, "altup_predict_coef", self.modes(i, h[0])).reshape(-1, 4, 4)
            h = h + np.einsum("tij,jtc->itc", rates, h)
            y = self.computed(i, h[0])
            rates = 1 + m.linear(i, "altup_correct_coef", self.modes(i, y))
            h = h + (y - h[0]) * rates.T[:, :, None]
            first = gelu(m.linear(i, "inp_gate", h[0] * w[f"blk.{i}.altup_correct_scale.weight"]))
            h[1:] += m.after(i, "post_norm", m.linear(i, "proj", first * inputs[:, i]))
        unembeddings = zip(h[1:], w["altup_unembd_proj.weight"], strict=True)
        mean = (h[0] + sum(sized(x @ a.T, h[0]) for x, a in unembeddings)) / 4
        return m.normed(mean, "output_norm")

    def computed(self, i: int, h: np.ndarray) -> np.ndarray:
        m, x = self.m, self.m.after(i, "attn_norm", h)
        low = m.linear(i, "laurel_r", m.linear(i, "laurel_l", x))
        y = h + m.after(i, "post_attention_norm", self.attention(i, x))
        y = (y + x + m.after(i, "laurel_post_norm", low)) / np.sqrt(2)
        return y + m.after(i, "post_ffw_norm", self.feed_forward(i, y))

    def feed_forward(self, i: int, h: np.ndarray) -> np.ndarray:
        m, x = self.m, self.m.after(i, "ffn_norm", h)
        gate = m.linear(i, "ffn_gate", x)
        if i < 10:
            cutoff = gate.mean(-1) + 1.6448533535003662 * gate.std(-1, ddof=1)
            gate = np.maximum(gate - cutoff[:, None], 0)
        return m.linear(i, "ffn_down", gelu(gate) * m.linear(i, "ffn_up", x))

    def modes(self, i: int, x: np.ndarray) -> np.ndarray:
        x = self.m.after(i, "altup_router_norm", x) / self.m.width
        return np.tanh(self.m.linear(i, "altup_router", x))


def sized(x: np.ndarray, like: np.ndarray) -> np.ndarray:
    return x * np.sqrt((like**2).sum(-1, keepdims=True) / (x**2).sum(-1, keepdims=True))
