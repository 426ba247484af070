"""Choosing tokens by PyTorch: see `choosing`."""

from packtrain.engine.ops.torch_kernels import rows, top_k_indices, torch

# Philox4x64-10 (Salmon et al. 2011): factors, and what is added to the keys; as signed words
M0, M1, W0, W1 = (
    n - (1 << 64)
    for n in (0xD2E7470EE14C6C93, 0xCA5A826395121157, 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B)
)
LOW_WORD, ROUNDS = 0xFFFFFFFF, 10


def candidates(out, x, *, k):
    ids, top_values = (rows(t) for t in out)
    x = rows(x)
    x = torch.where(x.isfinite(), x, torch.inf)
    top_ids = top_k_indices(x, k)
    ids.copy_(top_ids)
    torch.gather(x, -1, top_ids, out=top_values)


def draw(y, ids, x, numbers, counts):
    logits = x.double()
    logits = logits - logits[:, :1]
    temperature, top_p, min_p = (numbers[:, i : i + 1] for i in range(3))
    k, seed, index = (counts[:, i : i + 1] for i in range(3))
    candidate_index = torch.arange(x.shape[1], device=x.device)
    allowed = (candidate_index < k) | (k == 0)
    e = torch.where(allowed, logits.exp(), 0.0)
    cumulative_share = (e / e.cumsum(-1)[:, -1:]).cumsum(-1)
    allowed &= (candidate_index <= (cumulative_share < top_p).sum(-1, keepdim=True)) | (top_p >= 1)
    min_logit = torch.where(min_p > 0, min_p, 1.0).log().clamp_(max=0)
    allowed &= (logits >= min_logit) | (min_p <= 0)
    has_temperature = temperature > 0
    allowed &= has_temperature | (candidate_index == 0)
    e = torch.where(allowed, (logits / torch.where(has_temperature, temperature, 1.0)).exp(), 0.0)
    total = e.cumsum(-1)
    num_skipped = ((total <= uniform(seed, index) * total[:, -1:]) & allowed).sum(-1, keepdim=True)
    choice = torch.minimum(num_skipped, allowed.sum(-1, keepdim=True) - 1)
    first_ids = ids[:, :1].long()
    chosen_ids = torch.where(
        x[:, :1] == torch.inf, -1 - first_ids, ids.long().gather(1, choice.clamp(min=0))
    )
    y.copy_(chosen_ids[:, 0])


def high_word(a, b):
    """Return the upper half of a 128-bit product; words are signed, and mean unsigned ones."""
    a0, a1, b0, b1 = a & LOW_WORD, (a >> 32) & LOW_WORD, b & LOW_WORD, (b >> 32) & LOW_WORD
    middle_word = a1 * b0 + ((a0 * b0 >> 32) & LOW_WORD)
    cross_product = a0 * b1 + (middle_word & LOW_WORD)
    return a1 * b1 + ((middle_word >> 32) & LOW_WORD) + ((cross_product >> 32) & LOW_WORD)


def uniform(seed, index):
    """Return the first number of NumPy's Generator(Philox(key=seed, counter=index)).random(), for i64 tensors."""
    a = index + 1
    b = torch.zeros_like(index)
    c = torch.zeros_like(index)
    d = torch.zeros_like(index)
    k0, k1 = seed.clone(), torch.zeros_like(seed)
    for _ in range(ROUNDS):
        h0, l0, h1, l1 = high_word(M0, a), M0 * a, high_word(M1, c), M1 * c
        a, b, c, d = h1 ^ b ^ k0, l1, h0 ^ d ^ k1, l0
        k0, k1 = k0 + W0, k1 + W1
    return ((a >> 11) & ((1 << 53) - 1)).double() * 2.0**-53
