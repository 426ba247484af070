"""Build the tables for packing onto the grids of the IQ types: which points are near a place off the grid.

A place has a level for each of its 4 or 8 values; its key has three or two bits for each. In i32 words a table is

    an entry for each key: of a point, its number times 256; else the number of the first chunk there times 256, plus
        how many chunks there are
    the levels of each point, one byte each
    chunks, which count from the table's beginning: the numbers (u16) of sixteen points that are near, the nearest
        first, then for each value sixteen bytes: twice its level plus one

The shells of equal distance are those of iq2xs_init_impl and iq3xs_init_impl of ggml-quants.c.
"""

from functools import cache

import numpy as np

from packtrain.dtypes.element_type import Dtype
from packtrain.dtypes.grids import IQ2_XS_GRID, IQ3_S_GRID, IQ3_XXS_GRID, ONE, TWO_S, TWO_XXS
from packtrain.dtypes.iq import iq1_m, iq1_s, iq2_s, iq2_xs, iq2_xxs, iq3_s, iq3_xxs

GRIDS = {  # points, values of each, and how many shells are near
    iq1_s: (ONE, 8, 3), iq1_m: (ONE, 8, 3), iq2_xxs: (TWO_XXS, 8, 2), iq2_xs: (IQ2_XS_GRID, 8, 2), iq2_s: (TWO_S, 8, 1),
    iq3_xxs: (IQ3_XXS_GRID, 4, 2), iq3_s: (IQ3_S_GRID, 4, 3),
}  # fmt: skip
LANES = 16
POSITIONS_PER_CHUNK = 256  # places whose distances are computed at a time


@cache
def neighbour_table(dtype: Dtype) -> np.ndarray:
    """Return the table of this type's grid, i32; the first call builds it."""
    grid, width, num_shells = GRIDS[dtype]
    grid_values = grid.view(np.uint8).reshape(-1, 8)[:, :width]
    points = np.unique(grid_values, return_inverse=True)[1].reshape(-1, width)
    num_levels, bits = int(points.max()) + 1, 12 // width + width // 8
    positions = np.arange(num_levels**width)[:, None] // num_levels ** np.arange(width) % num_levels
    keys, point_keys = _level_keys(positions, bits), _level_keys(points, bits)
    off_grid = ~np.isin(keys, point_keys)
    chunk_starts, nearest_points = _nearest_points(positions[off_grid], points, num_shells)
    chunk_words = 8 + 4 * width
    before = (1 << bits * width) + len(points) * width // 4
    first_chunk = -(-before // chunk_words)
    grid_table = np.zeros((first_chunk + len(nearest_points)) * chunk_words, np.int32)
    grid_table[point_keys] = np.arange(len(points)) << 8
    grid_table[keys[off_grid]] = (chunk_starts[:-1] + first_chunk) << 8 | np.diff(chunk_starts)
    grid_table[1 << bits * width : before] = points.astype(np.uint8).view(np.int32).reshape(-1)
    chunks = grid_table[first_chunk * chunk_words :].reshape(-1, chunk_words)
    chunks[:, :8] = nearest_points.astype(np.uint16).view(np.int32)
    levels = np.ascontiguousarray((2 * points[nearest_points] + 1).transpose(0, 2, 1), np.uint8)
    chunks[:, 8:] = levels.reshape(len(nearest_points), -1).view(np.int32)
    return grid_table


def _level_keys(levels: np.ndarray, bits: int) -> np.ndarray:
    """Return a number for each row of levels, its levels in `bits` bits each."""
    keys: np.ndarray = (levels << bits * np.arange(levels.shape[1])).sum(1)
    return keys


def _nearest_points(
    places: np.ndarray, points: np.ndarray, num_shells: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return where each place's chunks begin, and the points of chunks (chunks, 16), filled up with the nearest one."""
    near_counts, near_points = [], []
    for i in range(0, len(places), POSITIONS_PER_CHUNK):
        position_part = places[i : i + POSITIONS_PER_CHUNK].astype(np.float32)
        far = np.square(position_part).sum(1)[:, None] + np.square(points.astype(np.float32)).sum(1)
        far -= 2 * position_part @ points.T.astype(np.float32)
        shell_distance = np.full((len(position_part), 1), -1, np.float32)
        for _ in range(num_shells):
            shell_distance = np.where(far > shell_distance, far, np.inf).min(1, keepdims=True)
        position_index, point_index = np.nonzero(far <= shell_distance)
        distance_order = np.lexsort((point_index, far[position_index, point_index], position_index))
        near_counts.append(np.bincount(position_index, minlength=len(position_part)))
        near_points.append(point_index[distance_order])
    num_near, point_ids = np.concatenate(near_counts), np.concatenate(near_points)
    chunk_starts = np.append(0, np.cumsum(-(-num_near // LANES)))
    begin = np.cumsum(num_near) - num_near
    chunk_points = np.repeat(point_ids[begin], np.diff(chunk_starts))[:, None].repeat(LANES, 1)
    near_rank = np.arange(len(point_ids)) - np.repeat(begin, num_near)
    chunk_points.reshape(-1)[np.repeat(chunk_starts[:-1], num_near) * LANES + near_rank] = point_ids
    return chunk_starts, chunk_points
