// c = mask · relu(-(z + a)) over the output of a matrix product, in place: `fastbcd_cpu::kink`.
#include "arguments.h"

#define FASTBCD_LOOPS "kink_loops.h"
#include "both_targets.h"

namespace fastbcd {

// c [n, T, B], a [n, B], mask [n, T].
void kink(Tensor c, Tensor a, Tensor mask, bool fresh) {
  STD_TORCH_CHECK(c.dim() == 3, "c has ", c.dim(), " dimensions instead of 3");
  int64_t n = c.size(0), trials = c.size(1), batch = c.size(2);
  if (!trials || !batch || !n) return;
  ScalarType type = c.scalar_type();
  check("c", c, n * trials * batch, type, c.is_contiguous());
  check("a", a, n * batch, type, a.is_contiguous());
  check("mask", mask, n * trials, ScalarType::Byte, mask.is_contiguous());
  const uint8_t* bits = static_cast<const uint8_t*>(mask.data_ptr());
  auto run = [&]<class scalar>(scalar*) {
    scalar* values = static_cast<scalar*>(c.data_ptr());
    const scalar* affine = static_cast<const scalar*>(a.data_ptr());
    int64_t grain = std::max<int64_t>(1, 16384 / batch);
    torch::stable::parallel_for(0, n * trials, grain, [&](int64_t begin, int64_t end) {
      for (int64_t i = begin; i < end; ++i) {
        if (bits[i])
          FASTBCD_RUN(kink_row, values + i * batch, affine + i / trials * batch, batch, fresh);
        else
          std::fill_n(values + i * batch, batch, scalar(0));
      }
    });
  };
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Double,
                  "kink takes float32 and float64");
  type == ScalarType::Float ? run(static_cast<float*>(nullptr)) : run(static_cast<double*>(nullptr));
}

}  // namespace fastbcd

STABLE_TORCH_LIBRARY_FRAGMENT(fastbcd_cpu, m) {
  m.def("kink(Tensor(a!) c, Tensor a, Tensor mask, bool fresh) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(fastbcd_cpu, CPU, m) { m.impl("kink", TORCH_BOX(&fastbcd::kink)); }
