"""Tables with which values are packed onto the grids of the IQ types: which points are near a place off the grid.

A place has a level for each of its 4 or 8 values; its key has three or two bits for each. In i32 words a table is

    an entry for each key: of a point, its number times 256; else the number of the first chunk there times 256, plus
        how many chunks there are
    the levels of each point, one byte each
    chunks, which count from the table's beginning: the numbers (u16) of sixteen points that are near, the nearest
        first, then for each value sixteen bytes: twice its level plus one

As iq2xs_init_impl and iq3xs_init_impl of ggml-quants.c; their shells of equal distance.
"""

from functools import cache

import numpy as np

from packtrain.dtypes.element_type import Dtype
from packtrain.dtypes.grids import ONE, THREE_S, THREE_XXS, TWO_S, TWO_XS, TWO_XXS
from packtrain.dtypes.iq import iq1_m, iq1_s, iq2_s, iq2_xs, iq2_xxs, iq3_s, iq3_xxs

GRIDS = {  # points, values of each, and how many shells are near
    iq1_s: (ONE, 8, 3), iq1_m: (ONE, 8, 3), iq2_xxs: (TWO_XXS, 8, 2), iq2_xs: (TWO_XS, 8, 2), iq2_s: (TWO_S, 8, 1),
    iq3_xxs: (THREE_XXS, 4, 2), iq3_s: (THREE_S, 4, 3),
}  # fmt: skip
LANES = 16
PART = 256  # places whose distances are computed at a time


@cache
def neighbours(dtype: Dtype) -> np.ndarray:
    """The table of this type's grid, i32: made at first use."""
    grid, width, shells = GRIDS[dtype]
    values = grid.view(np.uint8).reshape(-1, 8)[:, :width]
    points = np.unique(values, return_inverse=True)[1].reshape(-1, width)
    count, bits = int(points.max()) + 1, 12 // width + width // 8
    places = np.arange(count**width)[:, None] // count ** np.arange(width) % count
    keys, at = _keys(places, bits), _keys(points, bits)
    off_grid = ~np.isin(keys, at)
    first, nearest_points = _near(places[off_grid], points, shells)
    chunk = 8 + 4 * width
    before = (1 << bits * width) + len(points) * width // 4
    start = -(-before // chunk)
    table = np.zeros((start + len(nearest_points)) * chunk, np.int32)
    table[at] = np.arange(len(points)) << 8
    table[keys[off_grid]] = (first[:-1] + start) << 8 | np.diff(first)
    table[1 << bits * width : before] = points.astype(np.uint8).view(np.int32).reshape(-1)
    chunks = table[start * chunk :].reshape(-1, chunk)
    chunks[:, :8] = nearest_points.astype(np.uint16).view(np.int32)
    levels = np.ascontiguousarray((2 * points[nearest_points] + 1).transpose(0, 2, 1), np.uint8)
    chunks[:, 8:] = levels.reshape(len(nearest_points), -1).view(np.int32)
    return table


def _keys(levels: np.ndarray, bits: int) -> np.ndarray:
    keys: np.ndarray = (levels << bits * np.arange(levels.shape[1])).sum(1)
    return keys


def _near(places: np.ndarray, points: np.ndarray, shells: int) -> tuple[np.ndarray, np.ndarray]:
    """Where each place's chunks begin, and the points in each (chunks, 16): the last is filled with its first one."""
    sizes, rows = [], []
    for i in range(0, len(places), PART):
        part = places[i : i + PART].astype(np.float32)
        far = np.square(part).sum(1)[:, None] + np.square(points.astype(np.float32)).sum(1)
        far -= 2 * part @ points.T.astype(np.float32)
        limit = np.full((len(part), 1), -1, np.float32)
        for _ in range(shells):
            limit = np.where(far > limit, far, np.inf).min(1, keepdims=True)
        row, point = np.nonzero(far <= limit)
        order = np.lexsort((point, far[row, point], row))
        sizes.append(np.bincount(row, minlength=len(part)))
        rows.append(point[order])
    size, point_ids = np.concatenate(sizes), np.concatenate(rows)
    first = np.append(0, np.cumsum(-(-size // LANES)))
    begin = np.cumsum(size) - size
    chunk_points = np.repeat(point_ids[begin], np.diff(first))[:, None].repeat(LANES, 1)
    rank = np.arange(len(point_ids)) - np.repeat(begin, size)
    chunk_points.reshape(-1)[np.repeat(first[:-1], size) * LANES + rank] = point_ids
    return first, chunk_points
