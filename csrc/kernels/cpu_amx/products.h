// The tile products of attention as a stream of single steps, so that they can be done a little at
// a time between the vector work of another block: tiles and vectors have execution units of their
// own.
#pragma once

#include <stdint.h>

#include "autofa/cpu/amx.h"
#include "config.h"

namespace autofa::cpu_amx {

// Sums of products over squares: for i in [0, runs), square i of `to` becomes (or is increased by,
// if `add`) the sum over s in [0, steps) of the left square at a + i * a_run + s * a_step times the
// right square at b + s.
struct Batch {
  const uint16_t* a;
  int64_t a_row_bytes, a_half, a_run, a_step;  // the second tile of a square lies a_half behind
  const uint16_t* b;
  float* to;
  int64_t runs, steps;
  bool add;
};

class Products {
 public:
  void add(const Batch& batch) {
    if (batch.runs < 1 || batch.steps < 1) return;
    batches_[end_++] = batch;
    todo_ += batch.runs * batch.steps;
    if (!left_) open();
  }

  // Steps not done yet.
  int64_t todo() const { return todo_; }

  // A quarter of a step; the four phases follow one another.
  template <int Phase>
  __attribute__((always_inline)) void advance() {
    if (!left_) return;
    if constexpr (Phase == 0) {
      cpu::amx::load<4>(a_, a_row_bytes_);
      cpu::amx::load<6>(b_, kTileRowBytes);
      cpu::amx::multiply_add<0, 4, 6>();
    } else if constexpr (Phase == 1) {
      cpu::amx::load<7>(b_ + kOperandTile, kTileRowBytes);
      cpu::amx::multiply_add<1, 4, 7>();
    } else if constexpr (Phase == 2) {
      cpu::amx::load<5>(a_ + a_half_, a_row_bytes_);
      cpu::amx::multiply_add<2, 5, 6>();
    } else {
      cpu::amx::multiply_add<3, 5, 7>();
      a_ += a_step_;
      b_ += kOperandSquare;
      if (--left_ == 0) close();
    }
  }

  void drain() {
    while (left_) {
      advance<0>();
      advance<1>();
      advance<2>();
      advance<3>();
    }
    begin_ = end_ = 0;
  }

 private:
  // The sums of the next run: from zero, or from what is there.
  void open() {
    const Batch& batch = batches_[begin_];
    a_ = batch.a + run_ * batch.a_run;
    a_row_bytes_ = batch.a_row_bytes;
    a_half_ = batch.a_half;
    a_step_ = batch.a_step;
    b_ = batch.b;
    to_ = batch.to + run_ * kSumSquare;
    left_ = batch.steps;
    if (batch.add) {
      cpu::amx::load<0>(to_, kTileRowBytes);
      cpu::amx::load<1>(to_ + kSumTile, kTileRowBytes);
      cpu::amx::load<2>(to_ + 2 * kSumTile, kTileRowBytes);
      cpu::amx::load<3>(to_ + 3 * kSumTile, kTileRowBytes);
    } else {
      cpu::amx::zero<0>();
      cpu::amx::zero<1>();
      cpu::amx::zero<2>();
      cpu::amx::zero<3>();
    }
  }

  __attribute__((noinline)) void close() {
    cpu::amx::store<0>(to_, kTileRowBytes);
    cpu::amx::store<1>(to_ + kSumTile, kTileRowBytes);
    cpu::amx::store<2>(to_ + 2 * kSumTile, kTileRowBytes);
    cpu::amx::store<3>(to_ + 3 * kSumTile, kTileRowBytes);
    todo_ -= batches_[begin_].steps;
    if (++run_ == batches_[begin_].runs) {
      run_ = 0;
      ++begin_;
    }
    if (begin_ < end_) open();
  }

  const uint16_t *a_ = nullptr, *b_ = nullptr;
  float* to_ = nullptr;
  int64_t a_row_bytes_ = 0, a_half_ = 0, a_step_ = 0;
  int64_t left_ = 0;  // steps of the open run; 0 if none is open
  int64_t run_ = 0, todo_ = 0;
  int begin_ = 0, end_ = 0;
  Batch batches_[3];
};

}  // namespace autofa::cpu_amx
