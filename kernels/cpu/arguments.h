// Shared by the operators of all .cpp files: the tensors of a call checked and turned into
// pointers, the choice of a dtype and of an instruction set, the split over threads, the last
// stage of sums.
//
// Geometry is passed as int[]: trials, batch, channels, inner, channels_last, mask_last, x_shared,
// residual_shared. Device, dtype, size and memory layout of every tensor are checked against it.
#pragma once

#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <bit>
#include <cstring>
#include <limits>
#include <memory>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "geometry.h"

// Where both_targets.h compiles the loops a second time, for AVX2.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FASTBCD_X86 1
#endif

namespace fastbcd {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

#ifdef FASTBCD_X86
inline const bool has_avx2 = __builtin_cpu_supports("x86-64-v3");
#define FASTBCD_RUN(function, ...) \
  (has_avx2 ? avx2::function(__VA_ARGS__) : baseline::function(__VA_ARGS__))
#else
constexpr bool has_avx2 = false;
#define FASTBCD_RUN(function, ...) baseline::function(__VA_ARGS__)
#endif

inline Geometry geometry(const std::vector<int64_t>& v) {
  STD_TORCH_CHECK(v.size() == 8, "geometry has ", v.size(), " numbers instead of 8");
  STD_TORCH_CHECK(std::min({v[0], v[1], v[2], v[3]}) > 0, "geometry has a size below 1");
  return {v[0], v[1], v[2], v[3], v[4] != 0, v[5] != 0, v[6] != 0, v[7] != 0};
}

// Is t dense memory: [lead, C, inner], or [lead, inner, C] if last? t may have more dimensions.
inline bool is_dense(const Tensor& t, int64_t lead, int64_t channels, int64_t inner, bool last) {
  if (!last || channels == 1 || inner == 1) return t.is_contiguous();
  auto sizes = t.sizes(), strides = t.strides();
  int64_t dims = static_cast<int64_t>(sizes.size()), channel = 0;
  for (int64_t before = 1; channel < dims && (before != lead || sizes[channel] != channels);)
    before *= sizes[channel++];
  if (channel == dims) return false;
  int64_t expected = 1;
  auto matches = [&](int64_t d) {
    bool same = sizes[d] == 1 || strides[d] == expected;
    expected *= sizes[d];
    return same;
  };
  bool all = matches(channel);
  for (int64_t d = dims - 1; d > channel; --d) all &= matches(d);
  for (int64_t d = channel - 1; d >= 0; --d) all &= matches(d);
  return all;
}

inline void check(const char* name, const Tensor& t, int64_t numel, ScalarType type, bool dense) {
  STD_TORCH_CHECK(t.is_cpu(), name, " is not on the CPU");
  STD_TORCH_CHECK(t.numel() == numel, name, " has ", t.numel(), " elements instead of ", numel);
  STD_TORCH_CHECK(t.scalar_type() == type, name, " has another dtype than the call");
  STD_TORCH_CHECK(dense, name, " does not lie in memory as the call says");
}

// The pointers of one call's tensors, each checked against its geometry; null for no tensor.
template <class scalar, class compute>
struct Arguments {
  Geometry g;
  ScalarType type, compute_type;

  // [T, B, n], or [B, n] if shared by the trials
  scalar* items(const char* name, const MaybeTensor& t, bool shared = false) const {
    int64_t lead = (shared ? 1 : g.trials) * g.batch;
    return pointer<scalar>(name, t, lead, g.channels, g.inner, g.channels_last, type);
  }
  // [rows, C]
  compute* by_channel(const char* name, const MaybeTensor& t, int64_t rows) const {
    return pointer<compute>(name, t, rows, g.channels, 1, false, compute_type);
  }
  // [n] in the memory order of x
  compute* by_unit(const char* name, const MaybeTensor& t) const {
    return pointer<compute>(name, t, 1, g.channels, g.inner, g.channels_last, compute_type);
  }

 private:
  template <class T>
  static T* pointer(const char* name, const MaybeTensor& t, int64_t lead, int64_t channels,
                    int64_t inner, bool last, ScalarType expected) {
    if (!t) return nullptr;
    bool dense = is_dense(*t, lead, channels, inner, last);
    check(name, *t, lead * channels * inner, expected, dense);
    return static_cast<T*>(t->data_ptr());
  }
};

// A call without trials whose tensors a kernel reads as they are. What it refuses is checked, copied
// or rejected with a reason by fastbcd/ops.
struct PlainCall {
  const Tensor &x, &mask;
  Geometry g{};
  ScalarType compute_type;

  PlainCall(const Tensor& x, const Tensor& mask) : x(x), mask(mask) {
    compute_type = x.scalar_type() == ScalarType::Double ? ScalarType::Double : ScalarType::Float;
  }

  // Whether x [B, C, ...] and mask [C, ...] are as a kernel takes them; sets the geometry.
  bool fits() {
    if (!x.is_cpu() || !mask.is_cpu() || x.numel() == 0 || x.dim() != mask.dim() + 1) return false;
    auto sizes = x.sizes(), bits = mask.sizes();
    if (mask.dim() == 0 || !std::equal(bits.begin(), bits.end(), sizes.begin() + 1)) return false;
    ScalarType type = x.scalar_type(), bit = mask.scalar_type();
    bool soft = bit == compute_type;
    if (bit != ScalarType::Bool && bit != ScalarType::Byte && !soft) return false;
    if (type != compute_type && type != ScalarType::Half && type != ScalarType::BFloat16)
      return false;
    int64_t channels = bits[0], inner = mask.numel() / channels;
    g = {1, sizes[0], channels, inner, !x.is_contiguous(), !mask.is_contiguous(), false, false};
    if (soft || channels == 1 || inner == 1) g.mask_last = g.channels_last;
    return is_dense(x, g.batch, channels, inner, g.channels_last) &&
           is_dense(mask, 1, channels, inner, g.mask_last);
  }
  // No tensor, or one like x.
  bool fits_items(const MaybeTensor& t) const {
    if (!t) return true;
    auto sizes = x.sizes(), own = t->sizes();
    return t->is_cpu() && t->scalar_type() == x.scalar_type() &&
           std::equal(own.begin(), own.end(), sizes.begin(), sizes.end()) &&
           is_dense(*t, g.batch, g.channels, g.inner, g.channels_last);
  }
  // No tensor, or [C].
  bool fits_small(const MaybeTensor& t, int64_t dims = 1) const {
    return !t || (t->is_cpu() && t->scalar_type() == compute_type && t->is_contiguous() &&
                  t->dim() == dims && t->size(dims - 1) == g.channels);
  }
  // No tensor, or [2, C], or [3, C].
  bool fits_coef(const MaybeTensor& t) const {
    return fits_small(t, 2) && (!t || t->size(0) == 2 || t->size(0) == 3);
  }
  std::vector<int64_t> numbers() const {
    return {1, g.batch, g.channels, g.inner, g.channels_last, g.mask_last, 0, 0};
  }
};

// to[r * width + c] = from[c * height + r] for 8 x 8 bytes: three exchanges of quarters, of 4, 2 and
// 1 bytes, on rows held as 64-bit numbers.
inline void transpose_8x8(const uint8_t* from, int64_t height, uint8_t* to, int64_t width) {
  static_assert(std::endian::native == std::endian::little);
  uint64_t row[8];
  for (int i = 0; i < 8; ++i) std::memcpy(row + i, from + i * height, 8);
  auto exchange = [&](int distance, uint64_t half) {
    for (int i = 0; i < 8; ++i) {
      if (i & distance) continue;
      uint64_t moved = (row[i] >> 8 * distance ^ row[i + distance]) & half;
      row[i + distance] ^= moved;
      row[i] ^= moved << 8 * distance;
    }
  };
  exchange(4, 0x00000000FFFFFFFF);
  exchange(2, 0x0000FFFF0000FFFF);
  exchange(1, 0x00FF00FF00FF00FF);
  for (int i = 0; i < 8; ++i) std::memcpy(to + i * width, row + i, 8);
}

// The masks [T, n] in x's memory order: the tensor's own memory, or a transposed copy; null for
// numbers in place of the bits.
class OrderedMask {
 public:
  OrderedMask(const Tensor& mask, const Geometry& g) {
    ScalarType given = mask.scalar_type();
    if (given == ScalarType::Float || given == ScalarType::Double) return;
    ScalarType type = mask.scalar_type() == ScalarType::Bool ? ScalarType::Bool : ScalarType::Byte;
    bool dense = is_dense(mask, g.trials, g.channels, g.inner, g.mask_last);
    check("mask", mask, g.trials * g.items(), type, dense);
    bits_ = static_cast<const uint8_t*>(mask.data_ptr());
    if (g.mask_last == g.channels_last) return;
    copy_ = std::make_unique_for_overwrite<uint8_t[]>(mask.numel());
    // x lies as rows of `width`, the mask as rows of `height`.
    int64_t width = g.channels_last ? g.channels : g.inner;
    int64_t height = g.channels_last ? g.inner : g.channels;
    constexpr int64_t side = 8;
    int64_t blocks = (height + side - 1) / side;
    torch::stable::parallel_for(0, g.trials * blocks, 32, [&](int64_t begin, int64_t end) {
      for (int64_t k = begin; k < end; ++k) {
        int64_t first = k / blocks * g.items(), r0 = k % blocks * side;
        const uint8_t* from = bits_ + first + r0;
        uint8_t* to = copy_.get() + first + r0 * width;
        int64_t rows = std::min(side, height - r0), c = 0;
        for (; rows == side && c + side <= width; c += side)
          transpose_8x8(from + c * height, height, to + c, width);
        for (; c < width; ++c)
          for (int64_t r = 0; r < rows; ++r) to[r * width + c] = from[c * height + r];
      }
    });
    bits_ = copy_.get();
  }
  operator const uint8_t*() const { return bits_; }

 private:
  std::unique_ptr<uint8_t[]> copy_;
  const uint8_t* bits_ = nullptr;
};

template <class F>
void by_dtype(ScalarType type, const Geometry& g, F&& f) {
  using torch::headeronly::BFloat16;
  using torch::headeronly::Half;
  switch (type) {
    case ScalarType::Float: return f(Arguments<float, float>{g, type, type});
    case ScalarType::Double: return f(Arguments<double, double>{g, type, type});
    case ScalarType::Half: return f(Arguments<Half, float>{g, type, ScalarType::Float});
    case ScalarType::BFloat16: return f(Arguments<BFloat16, float>{g, type, ScalarType::Float});
    default: STD_TORCH_CHECK(false, "the CPU kernels take float32, float64, float16, bfloat16");
  }
}

// run(begin, end) over the work items, on torch's own threads; small calls stay on one.
constexpr int64_t least_elements = 32768;

template <class F>
void in_parallel(const Geometry& g, const Cut& cut, F&& run) {
  int64_t per_item = std::max<int64_t>(
      1, std::min(Cut::tile, g.items()) * cut.per_chunk * g.trials);
  int64_t grain = (least_elements + per_item - 1) / per_item;
  torch::stable::parallel_for(0, cut.work_items(), grain, run);
}

// out[row][c] = sum of partial sums [row][chunk][element] over chunks and the channel's elements,
// in double and in one fixed order.
template <class compute>
void sum_channels(compute* out, const compute* sums, const Geometry& g, const Cut& cut, int64_t row) {
  int64_t step = g.channels_last ? g.channels : 1;
  for (int64_t c = 0; c < g.channels; ++c) {
    double total = 0;
    for (int64_t k = 0; k < cut.chunks; ++k) {
      const compute* p = sums + (row * cut.chunks + k) * g.items() +
                         (g.channels_last ? c : c * g.inner);
      for (int64_t i = 0; i < g.inner; ++i) total += p[i * step];
    }
    out[c] = static_cast<compute>(total);
  }
}

// out[i] = sum of partial sums [chunk][i] over chunks, in double and in their order.
template <class compute>
void sum_chunks(compute* out, const compute* sums, const Geometry& g, const Cut& cut) {
  torch::stable::parallel_for(0, g.items(), 16384, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      double total = 0;
      for (int64_t k = 0; k < cut.chunks; ++k) total += sums[k * g.items() + i];
      out[i] = static_cast<compute>(total);
    }
  });
}

}  // namespace fastbcd
