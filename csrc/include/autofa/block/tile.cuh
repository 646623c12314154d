// Tiles of 16-bit elements in shared memory: layout, loads from global memory, mma fragments.
//
// A tile is cut into panels of up to 64 columns, one 128-byte line per row, whose 16-byte chunks
// are permuted by the row (XOR). Eight rows of one chunk then fall into eight different bank
// groups, so neither ldmatrix nor the 16-byte copies conflict, for every head dim.
#pragma once

#include <cstdint>

#include "autofa/arch/cp_async.cuh"
#include "autofa/arch/ldmatrix.cuh"
#include "autofa/arch/shared_memory.cuh"

namespace autofa {

template <int Rows, int Cols>
struct Tile {
  static_assert(Rows % 16 == 0 && Cols % 16 == 0, "mma reads 16x16 squares");
  static constexpr int rows = Rows;
  static constexpr int cols = Cols;
  static constexpr int panel_cols = Cols % 64 == 0 ? 64 : Cols % 32 == 0 ? 32 : 16;
  static constexpr int panels = Cols / panel_cols;
  static constexpr int row_chunks = panel_cols / 8;
  static constexpr int row_bytes = panel_cols * 2;
  static constexpr int panel_bytes = Rows * row_bytes;
  static constexpr int bytes = Rows * Cols * 2;

  // Where a 16-byte chunk of a panel's row lies. Unchanged, but for whole rows, by 8 rows more.
  static __device__ __forceinline__ uint32_t offset(int row, int chunk, int panel = 0) {
    const int swizzled = chunk ^ ((row / (8 / row_chunks)) % row_chunks);
    return panel * panel_bytes + row * row_bytes + swizzled * 16;
  }
};

// Copies tiles of one matrix, from any row and from any column that starts a tile. The block's
// threads lie along a panel's rows, then down them, then across panels, and each keeps its place:
// where a panel has no more chunks than there are threads, some may have nothing to do.
template <class Tile, int Threads, int HeadDim>
class TileLoader {
  static constexpr int panel_chunks = Tile::rows * Tile::row_chunks;
  static constexpr int panels_per_pass = Threads > panel_chunks ? Threads / panel_chunks : 1;
  static constexpr int rows_per_pass =
      Threads > panel_chunks ? Tile::rows : Threads / Tile::row_chunks;
  static_assert(rows_per_pass % 8 == 0, "a thread moves its chunks at one swizzle");

 public:
  // `matrix` is row 0; `row_stride` counts elements.
  __device__ __forceinline__ TileLoader(const void* matrix, int64_t row_stride)
      : panel_(static_cast<int>(threadIdx.x) / (rows_per_pass * Tile::row_chunks)),
        row_(static_cast<int>(threadIdx.x) / Tile::row_chunks % rows_per_pass),
        chunk_(panel_ * Tile::row_chunks + static_cast<int>(threadIdx.x) % Tile::row_chunks),
        row_bytes_(row_stride * 2),
        source_(static_cast<const char*>(matrix) + row_ * row_bytes_ + chunk_ * 16),
        target_(Tile::offset(row_, chunk_ % Tile::row_chunks, panel_)) {}

  // Starts the copy of Tile::rows rows from `first_row` and Tile::cols columns from `first_col` on
  // into the tile at `target`. Rows from `row_count` on and columns from HeadDim on become zeros,
  // and nothing of them is read.
  __device__ __forceinline__ void load(uint32_t target, int first_row, int row_count,
                                       int first_col = 0) const {
    if (first_row + Tile::rows <= row_count) {
      copy<false>(target, first_row, row_count, first_col);
    } else {
      copy<true>(target, first_row, row_count, first_col);
    }
  }

  // Calls f(address) for each 16-byte chunk that this thread copies into the tile at `target`. Not
  // unrolled: it serves rare cases, and their code is fetched for one use.
  template <class Function>
  __device__ __forceinline__ void for_each_chunk(uint32_t target, Function f) const {
#pragma unroll 1
    for (int panel = 0; panel < Tile::panels; panel += panels_per_pass) {
#pragma unroll 1
      for (int row = 0; row < Tile::rows; row += rows_per_pass) {
        if (in_tile(row, panel)) f(chunk_at(target, row, panel));
      }
    }
  }

 private:
  template <bool Ragged>
  __device__ __forceinline__ void copy(uint32_t target, int first_row, int row_count,
                                       int first_col) const {
    const char* source = source_ + first_row * row_bytes_ + first_col * 2;
#pragma unroll
    for (int row = 0; row < Tile::rows; row += rows_per_pass) {
#pragma unroll
      for (int panel = 0; panel < Tile::panels; panel += panels_per_pass) {
        if (!in_tile(row, panel)) continue;
        bool valid = !Ragged || first_row + row + row_ < row_count;
        if constexpr (HeadDim % Tile::cols != 0) {
          valid = valid && first_col + (panel * Tile::row_chunks + chunk_) * 8 < HeadDim;
        }
        cp_async_16(chunk_at(target, row, panel), source + panel * Tile::row_bytes, valid);
      }
      source += rows_per_pass * row_bytes_;
    }
  }

  // Whether this thread has a chunk in the pass over the tile that starts at `row` and `panel`.
  __device__ __forceinline__ bool in_tile(int row, int panel) const {
    constexpr bool idle_threads = Threads > panel_chunks && Threads % panel_chunks != 0;
    return (Tile::rows % rows_per_pass == 0 || row + row_ < Tile::rows) &&
           (Tile::panels % panels_per_pass == 0 || panel + panel_ < Tile::panels) &&
           (!idle_threads || panel_ < panels_per_pass);
  }

  __device__ __forceinline__ uint32_t chunk_at(uint32_t target, int row, int panel) const {
    return target + target_ + panel * Tile::panel_bytes + row * Tile::row_bytes;
  }

  int panel_, row_, chunk_;  // the thread's chunk counts from the tile's first column
  int64_t row_bytes_;
  const char* source_;
  uint32_t target_;
};

// Flips the sign of the chunks that the calling thread copied; other threads need a barrier.
template <class Loader>
__device__ __forceinline__ void negate_tile(const Loader& loader, uint32_t tile) {
  loader.for_each_chunk(tile, [](uint32_t address) {
    uint32_t words[4];
    load_shared_16(words, address);
#pragma unroll
    for (int i = 0; i < 4; ++i) words[i] ^= 0x80008000u;
    store_shared_16(address, words);
  });
}

// Reads a tile's 16x16 squares as mma fragments.
template <class Tile>
class FragmentReader {
  static constexpr int panel_squares = Tile::panel_cols / 16;

  __device__ __forceinline__ FragmentReader(uint32_t tile, int row, int chunk)
      : base_(tile + Tile::offset(row, chunk)) {}

  // Two chunks make a square, and the swizzle is an XOR: so is the step between squares.
  __device__ __forceinline__ uint32_t address(int square_row, int square_col) const {
    return (base_ ^ (square_col % panel_squares * 32)) +
           square_col / panel_squares * Tile::panel_bytes + square_row * 16 * Tile::row_bytes;
  }

  uint32_t base_;

 public:
  // For operands whose rows run along the fragment's rows: A (queries), transposed B (values).
  static __device__ __forceinline__ FragmentReader by_rows(uint32_t tile, int first_row = 0) {
    const int lane = threadIdx.x % 32;
    return FragmentReader(tile, first_row + lane % 16, lane / 16);
  }
  // For B operands stored as n x k (keys): a pair of registers per 8 rows.
  static __device__ __forceinline__ FragmentReader by_cols(uint32_t tile) {
    const int lane = threadIdx.x % 32;
    return FragmentReader(tile, lane % 8 + lane / 16 * 8, lane / 8 % 2);
  }

  // Counts from this square on. The columns that are then read must, modulo those of a panel, have
  // no bit in common with `square_col`.
  __device__ __forceinline__ FragmentReader from(int square_row, int square_col) const {
    FragmentReader moved = *this;
    moved.base_ = address(square_row, square_col);
    return moved;
  }

  __device__ __forceinline__ void read(uint32_t (&fragment)[4], int square_row,
                                       int square_col) const {
    ldmatrix_x4(fragment, address(square_row, square_col));
  }
  __device__ __forceinline__ void read_transposed(uint32_t (&fragment)[4], int square_row,
                                                  int square_col) const {
    ldmatrix_x4_trans(fragment, address(square_row, square_col));
  }
};

}  // namespace autofa
