// One kernel call as the loops see it: flat arrays, sizes and memory orders (kernels/geometry.py).
//
//   x, residual [T or 1, B, n]    y, grad [T, B, n]    mask [T, n] bytes    n = channels * inner
#pragma once

#include <algorithm>
#include <cstdint>

namespace fastbcd {

struct Geometry {
  int64_t trials, batch, channels, inner;
  bool channels_last, mask_last, x_shared, residual_shared;

  int64_t items() const { return channels * inner; }
};

// A work item is a tile of an item's elements over a chunk of the batch, for all trials: what
// belongs to the tile (mask, scale, shift, coefficients) is prepared once and stays in cache.
struct Cut {
  static constexpr int64_t tile = 2048;
  int64_t tiles, chunks, per_chunk;

  Cut(const Geometry& g, int64_t least_work_items) {
    constexpr int64_t least_batch = 8;
    tiles = (g.items() + tile - 1) / tile;
    int64_t wanted = (least_work_items + tiles - 1) / tiles;
    int64_t most = (g.batch + least_batch - 1) / least_batch;
    per_chunk = (g.batch + std::min(wanted, most) - 1) / std::min(wanted, most);
    chunks = (g.batch + per_chunk - 1) / per_chunk;
  }
  int64_t work_items() const { return tiles * chunks; }
};

// A work item: elements first .. first + m - 1 of the batch items b0 .. b1 - 1.
struct Part {
  int64_t first, m, chunk, b0, b1;

  Part(const Geometry& g, const Cut& cut, int64_t item)
      : first(item % cut.tiles * Cut::tile), m(std::min(Cut::tile, g.items() - first)),
        chunk(item / cut.tiles), b0(chunk * cut.per_chunk),
        b1(std::min(g.batch, b0 + cut.per_chunk)) {}
};

}  // namespace fastbcd
