// c = mask · relu(-(z + a)) over the output of a matrix product, in place: fastbcd_cpu::kinks.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>

#include <algorithm>
#include <cstdint>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define FASTBCD_CLONES __attribute__((target_clones("default", "arch=x86-64-v3")))
#else
#define FASTBCD_CLONES
#endif

namespace fastbcd {

using torch::headeronly::ScalarType;
using torch::stable::Tensor;

// One kink of one trial, for all images. A NaN passes where the bit is set.
template <class scalar>
inline __attribute__((always_inline)) void row(
    scalar* __restrict c, const scalar* __restrict a, int64_t n, bool fresh) {
  for (int64_t i = 0; i < n; ++i) {
    scalar v = -((fresh ? scalar(0) : c[i]) + a[i]);
    c[i] = v <= scalar(0) ? scalar(0) : v;
  }
}

FASTBCD_CLONES void row_float(float* c, const float* a, int64_t n, bool fresh) {
  fresh ? row(c, a, n, true) : row(c, a, n, false);
}

FASTBCD_CLONES void row_double(double* c, const double* a, int64_t n, bool fresh) {
  fresh ? row(c, a, n, true) : row(c, a, n, false);
}

// c [n, T, B], a [n, B], mask [n, T].
void kinks(Tensor c, Tensor a, Tensor mask, bool fresh) {
  STD_TORCH_CHECK(c.dim() == 3 && a.dim() == 2 && mask.dim() == 2, "kinks: c [n,T,B], a [n,B], "
                  "mask [n,T]");
  int64_t n = c.size(0), trials = c.size(1), batch = c.size(2);
  STD_TORCH_CHECK(a.size(0) == n && a.size(1) == batch && mask.size(0) == n &&
                  mask.size(1) == trials, "kinks: the sizes do not fit");
  if (!trials || !batch || !n) return;
  STD_TORCH_CHECK(c.is_cpu() && a.is_cpu() && mask.is_cpu(), "kinks: not on the CPU");
  STD_TORCH_CHECK(c.is_contiguous() && a.is_contiguous() && mask.is_contiguous(),
                  "kinks: not contiguous");
  STD_TORCH_CHECK(c.scalar_type() == a.scalar_type() && mask.scalar_type() == ScalarType::Byte,
                  "kinks: dtypes do not fit");
  const uint8_t* m = static_cast<const uint8_t*>(mask.data_ptr());
  auto run = [&](auto* values, const auto* affine, auto function) {
    int64_t grain = std::max<int64_t>(1, 16384 / batch);
    torch::stable::parallel_for(0, n * trials, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        auto* c = values + i * batch;
        if (m[i]) {
          function(c, affine + i / trials * batch, batch, fresh);
        } else {
          std::fill_n(c, batch, 0);
        }
      }
    });
  };
  if (c.scalar_type() == ScalarType::Float) {
    run(static_cast<float*>(c.data_ptr()), static_cast<const float*>(a.data_ptr()), row_float);
  } else {
    STD_TORCH_CHECK(c.scalar_type() == ScalarType::Double, "kinks: float32 or float64 only");
    run(static_cast<double*>(c.data_ptr()), static_cast<const double*>(a.data_ptr()), row_double);
  }
}

}  // namespace fastbcd

STABLE_TORCH_LIBRARY_FRAGMENT(fastbcd_cpu, m) {
  m.def("kinks(Tensor(a!) c, Tensor a, Tensor mask, bool fresh) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastbcd_cpu, CPU, m) { m.impl("kinks", TORCH_BOX(&fastbcd::kinks)); }
