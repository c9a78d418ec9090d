// The calls of the masked activations, as their loops see them.
#pragma once

#include "arguments.h"

namespace fastbcd {

// scalar: the tensors' type. compute: float, or double for double.
template <class scalar, class compute>
struct MaskedForward {
  Geometry g;
  scalar* y;
  const scalar *x, *residual;  // residual may be null
  const uint8_t* mask;  // in x's memory order
  const compute *scale, *shift;  // [C], both or neither
  const compute* coef = nullptr;  // [3, C] for poly
};

template <class scalar, class compute>
struct MaskedBackward {
  Geometry g;
  scalar *dx, *dresidual;  // dresidual may be null
  const scalar* grad;
  const scalar* y = nullptr;  // for relu
  const scalar* x = nullptr;  // for poly, and for relu if dscale is wanted
  const scalar* residual = nullptr;  // for poly, may be null
  const uint8_t* mask;
  const compute* scale = nullptr;
  const compute *shift = nullptr, *coef = nullptr;  // for poly
  compute* sums = nullptr;  // [S, chunks, n] partial sums: (dc0, dc1, dc2,) dscale, dshift
};

// masked_relu_forward on memory that was checked before.
void run_masked_relu(const MaskedForward<float, float>& call);

}  // namespace fastbcd
