// The CPU kernels as operators `fastbcd_cpu::*`, on torch's stable ABI.
//
// Geometry comes as int[]: trials, batch, channels, inner, channels_last, mask_last, x_shared,
// residual_shared. Tensors are dense memory; only sizes and types are checked here, since
// fastbcd/ops.py is the one caller and has checked the rest.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <limits>
#include <optional>
#include <string>
#include <type_traits>
#include <vector>

#include "problem.h"

// The loops for any machine and for AVX2, chosen at run time. Memory, not arithmetic, is the
// limit, so wider vectors bring nothing.
namespace fastbcd::baseline {
#include "loops.h"
}
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FASTBCD_X86 1
#pragma GCC push_options
#pragma GCC target("arch=x86-64-v3")
namespace fastbcd::avx2 {
#include "loops.h"
}
#pragma GCC pop_options
#endif

namespace fastbcd {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;
using MaybeTensor = std::optional<Tensor>;

#ifdef FASTBCD_X86
const bool has_avx2 = __builtin_cpu_supports("x86-64-v3");
#define FASTBCD_RUN(function, ...) \
  (has_avx2 ? avx2::function(__VA_ARGS__) : baseline::function(__VA_ARGS__))
#else
constexpr bool has_avx2 = false;
#define FASTBCD_RUN(function, ...) baseline::function(__VA_ARGS__)
#endif

Geometry geometry(const std::vector<int64_t>& v) {
  STD_TORCH_CHECK(v.size() == 8, "geometry has ", v.size(), " numbers instead of 8");
  return {v[0], v[1], v[2], v[3], v[4] != 0, v[5] != 0, v[6] != 0, v[7] != 0};
}

void check(const char* name, const Tensor& t, int64_t numel, ScalarType type) {
  STD_TORCH_CHECK(t.is_cpu(), name, " is not on the CPU");
  STD_TORCH_CHECK(t.numel() == numel, name, " has ", t.numel(), " elements instead of ", numel);
  STD_TORCH_CHECK(t.scalar_type() == type, name, " has another dtype than the call");
}

template <class T>
T* pointer(const char* name, const MaybeTensor& t, int64_t numel, ScalarType type) {
  if (!t) return nullptr;
  check(name, *t, numel, type);
  return static_cast<T*>(t->data_ptr());
}

// The tensors of one call, checked against its geometry and turned into pointers.
template <class scalar, class compute>
struct Arguments {
  Geometry g;
  ScalarType type, compute_type;
  int64_t full = g.trials * g.batch * g.items(), single = g.batch * g.items();

  scalar* stacked(const char* name, const MaybeTensor& t) const {
    return pointer<scalar>(name, t, full, type);
  }
  scalar* maybe_shared(const char* name, const MaybeTensor& t, bool shared) const {
    return pointer<scalar>(name, t, shared ? single : full, type);
  }
  compute* by_channel(const char* name, const MaybeTensor& t, int64_t rows) const {
    return pointer<compute>(name, t, rows * g.channels, compute_type);
  }
};

// The masks [T, n] in x's memory order: themselves, or transposed once into `scratch`.
const uint8_t* ordered_mask(const Tensor& m, const Geometry& g, std::vector<uint8_t>& scratch) {
  STD_TORCH_CHECK(m.numel() == g.trials * g.items(), "mask has ", m.numel(), " elements");
  STD_TORCH_CHECK(m.element_size() == 1, "mask must be bool or uint8");
  const uint8_t* mask = static_cast<const uint8_t*>(m.data_ptr());
  if (g.mask_matches()) return mask;
  scratch.resize(m.numel());
  // x lies as rows of `width`, the mask as rows of `height`.
  int64_t width = g.channels_last ? g.channels : g.inner;
  int64_t height = g.channels_last ? g.inner : g.channels;
  constexpr int64_t block = 32;
  int64_t blocks = (height + block - 1) / block;
  torch::stable::parallel_for(0, g.trials * blocks, 8, [&](int64_t begin, int64_t end) {
    for (int64_t k = begin; k < end; ++k) {
      const uint8_t* from = mask + k / blocks * g.items();
      uint8_t* to = scratch.data() + k / blocks * g.items();
      int64_t r0 = k % blocks * block, r1 = std::min(height, r0 + block);
      for (int64_t c0 = 0; c0 < width; c0 += block)
        for (int64_t r = r0; r < r1; ++r)
          for (int64_t c = c0; c < std::min(width, c0 + block); ++c)
            to[r * width + c] = from[c * height + r];
    }
  });
  return scratch.data();
}

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
template <class F>
void in_parallel(const Geometry& g, const Cut& cut, F&& run) {
  constexpr int64_t least_elements = 32768;
  int64_t per_item = std::max<int64_t>(
      1, std::min(Cut::tile, g.items()) * cut.per_chunk * g.trials);
  int64_t grain = (least_elements + per_item - 1) / per_item;
  torch::stable::parallel_for(0, cut.work_items(), grain, run);
}

template <bool poly>
void forward(
    const Tensor& y, const Tensor& x, const Tensor& mask, const MaybeTensor& coef,
    const MaybeTensor& scale, const MaybeTensor& shift, const MaybeTensor& residual,
    const std::vector<int64_t>& numbers) {
  Geometry g = geometry(numbers);
  std::vector<uint8_t> scratch;
  const uint8_t* bits = ordered_mask(mask, g, scratch);
  by_dtype(x.scalar_type(), g, [&]<class scalar, class compute>(Arguments<scalar, compute> a) {
    Forward<scalar, compute> call{
        g, a.stacked("y", y), a.maybe_shared("x", x, g.x_shared),
        a.maybe_shared("residual", residual, g.residual_shared), bits,
        a.by_channel("scale", scale, 1), a.by_channel("shift", shift, 1),
        a.by_channel("coef", coef, 3)};
    Cut cut(g, 4 * torch::stable::get_num_threads());
    in_parallel(g, cut, [&](int64_t begin, int64_t end) {
      FASTBCD_RUN(template forward<poly>, call, cut, begin, end);
    });
  });
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

template <bool poly>
void backward(
    const Tensor& dx, const MaybeTensor& dresidual, const MaybeTensor& dcoef,
    const MaybeTensor& daffine, const Tensor& grad, const MaybeTensor& y, const MaybeTensor& x,
    const Tensor& mask, const MaybeTensor& coef, const MaybeTensor& scale,
    const MaybeTensor& shift, const MaybeTensor& residual, const std::vector<int64_t>& numbers) {
  Geometry g = geometry(numbers);
  std::vector<uint8_t> scratch;
  const uint8_t* bits = ordered_mask(mask, g, scratch);
  by_dtype(grad.scalar_type(), g, [&]<class scalar, class compute>(Arguments<scalar, compute> a) {
    // Sums follow the cut, so it must not depend on the number of threads.
    Cut cut(g, 64);
    int64_t rows = (poly ? 3 : 0) + (daffine ? 2 : 0);
    std::vector<compute> sums(rows * cut.chunks * g.items());
    Backward<scalar, compute> call{
        g, a.maybe_shared("dx", dx, g.x_shared),
        a.maybe_shared("dresidual", dresidual, g.residual_shared), a.stacked("grad", grad),
        a.stacked("y", y), a.maybe_shared("x", x, g.x_shared),
        a.maybe_shared("residual", residual, g.residual_shared), bits,
        a.by_channel("scale", scale, 1), a.by_channel("shift", shift, 1),
        a.by_channel("coef", coef, 3), rows ? sums.data() : nullptr};
    in_parallel(g, cut, [&](int64_t begin, int64_t end) {
      if constexpr (poly)
        FASTBCD_RUN(poly_backward, call, cut, begin, end);
      else
        FASTBCD_RUN(relu_backward, call, cut, begin, end);
    });
    compute* coefs = a.by_channel("dcoef", dcoef, 3);
    compute* affine = a.by_channel("daffine", daffine, 2);
    torch::stable::parallel_for(0, rows, 1, [&](int64_t begin, int64_t end) {
      for (int64_t row = begin; row < end; ++row) {
        int64_t affine_row = row - (poly ? 3 : 0);
        compute* out = affine_row < 0 ? coefs + row * g.channels : affine + affine_row * g.channels;
        sum_channels(out, sums.data(), g, cut, row);
      }
    });
  });
}

void relu_forward(
    Tensor y, Tensor x, Tensor mask, MaybeTensor scale, MaybeTensor shift, MaybeTensor residual,
    std::vector<int64_t> g) {
  forward<false>(y, x, mask, std::nullopt, scale, shift, residual, g);
}

void relu_backward(
    Tensor dx, MaybeTensor dresidual, MaybeTensor daffine, Tensor grad, Tensor y, Tensor mask,
    MaybeTensor x, MaybeTensor scale, std::vector<int64_t> g) {
  backward<false>(dx, dresidual, std::nullopt, daffine, grad, y, x, mask, std::nullopt, scale,
                  std::nullopt, std::nullopt, g);
}

void poly_forward(
    Tensor y, Tensor x, Tensor mask, Tensor coef, MaybeTensor scale, MaybeTensor shift,
    MaybeTensor residual, std::vector<int64_t> g) {
  forward<true>(y, x, mask, coef, scale, shift, residual, g);
}

void poly_backward(
    Tensor dx, MaybeTensor dresidual, Tensor dcoef, MaybeTensor daffine, Tensor grad, Tensor x,
    Tensor mask, Tensor coef, MaybeTensor scale, MaybeTensor shift, MaybeTensor residual,
    std::vector<int64_t> g) {
  backward<true>(dx, dresidual, dcoef, daffine, grad, std::nullopt, x, mask, coef, scale, shift,
                 residual, g);
}

std::string instruction_set() { return has_avx2 ? "avx2" : "baseline instruction set"; }

}  // namespace fastbcd

STABLE_TORCH_LIBRARY(fastbcd_cpu, m) {
  m.def("relu_forward(Tensor(a!) y, Tensor x, Tensor mask, Tensor? scale, Tensor? shift, "
        "Tensor? residual, int[] geometry) -> ()");
  m.def("relu_backward(Tensor(a!) dx, Tensor(b!)? dresidual, Tensor(c!)? daffine, Tensor grad, "
        "Tensor y, Tensor mask, Tensor? x, Tensor? scale, int[] geometry) -> ()");
  m.def("poly_forward(Tensor(a!) y, Tensor x, Tensor mask, Tensor coef, Tensor? scale, "
        "Tensor? shift, Tensor? residual, int[] geometry) -> ()");
  m.def("poly_backward(Tensor(a!) dx, Tensor(b!)? dresidual, Tensor(c!) dcoef, "
        "Tensor(d!)? daffine, Tensor grad, Tensor x, Tensor mask, Tensor coef, Tensor? scale, "
        "Tensor? shift, Tensor? residual, int[] geometry) -> ()");
  m.def("instruction_set() -> str");
}

STABLE_TORCH_LIBRARY_IMPL(fastbcd_cpu, CPU, m) {
  m.impl("relu_forward", TORCH_BOX(&fastbcd::relu_forward));
  m.impl("relu_backward", TORCH_BOX(&fastbcd::relu_backward));
  m.impl("poly_forward", TORCH_BOX(&fastbcd::poly_forward));
  m.impl("poly_backward", TORCH_BOX(&fastbcd::poly_backward));
}

STABLE_TORCH_LIBRARY_IMPL(fastbcd_cpu, CompositeExplicitAutograd, m) {
  m.impl("instruction_set", TORCH_BOX(&fastbcd::instruction_set));
}
