// One call of the masked activations, as its loops see it: flat arrays in x's memory order.
#pragma once

#include "arguments.h"

namespace fastbcd {

// What a backward reads and sums besides dcoef, dscale and dshift.
enum class Mode {
  output,     // dz from y: the identity with bits
  bits,       // dz from z
  effects,    // and the effect of every unit, but no dcoef
  indicator,  // and the effect of every unit
  soft,       // numbers in place of the bits; their gradients are those effects
};

// scalar: the tensors' type. compute: float, or double for double. Pointers may be null.
template <class scalar, class compute>
struct Masked {
  Geometry g;
  const scalar *x = nullptr, *residual = nullptr;
  const uint8_t* bits = nullptr;  // [T, n]
  const compute* alpha = nullptr;  // [n], in place of the bits
  const compute *coef = nullptr, *scale = nullptr, *shift = nullptr;  // [degree + 1, C], [C], [C]
  int degree = 0;
  scalar* y = nullptr;  // forward: written; backward: read, or null
  const scalar* grad = nullptr;
  scalar *dx = nullptr, *dresidual = nullptr;
  bool absolute = false;  // the effect of a unit is summed without its sign
  // Partial sums [rows, chunks, n] of dc0, dc1, dc2, dscale, dshift, dunits; row -1: not wanted.
  compute* sums = nullptr;
  int rows[6] = {-1, -1, -1, -1, -1, -1};
};

// The forward on memory that was checked before.
void run_forward(const Masked<float, float>& call);

}  // namespace fastbcd
