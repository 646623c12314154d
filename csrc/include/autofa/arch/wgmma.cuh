// wgmma (PTX ISA, "Asynchronous Warpgroup Level Matrix Multiply-Accumulate"; sm_90a): 64 x n sums
// in f32 of 16-bit operands, by the 128 threads of a warpgroup, behind its other work.
//
// A thread's sums are those of mma.m16n8k16, 8 columns after another: sums[i][0..1] of row
// lane / 4 and sums[i][2..3] of row lane / 4 + 8 of the warp's 16, columns 8 i + lane % 4 * 2 on.
// Two neighbouring packed pairs of them, 16 columns, are the left operand of the next product.
#pragma once

#include <cstdint>

#include "autofa/arch/element.cuh"
#include "autofa/arch/matrix_descriptor.cuh"

namespace autofa {

// Before the first product, and before one whose registers other instructions have written.
__device__ __forceinline__ void wgmma_fence() {
  asm volatile("wgmma.fence.sync.aligned;\n" ::: "memory");
}

// Ends a group: what was issued since the last one.
__device__ __forceinline__ void wgmma_commit() {
  asm volatile("wgmma.commit_group.sync.aligned;\n" ::: "memory");
}

// Waits until at most `Pending` of the latest groups are still under way.
template <int Pending>
__device__ __forceinline__ void wgmma_wait() {
  asm volatile("wgmma.wait_group.sync.aligned %0;\n" ::"n"(Pending) : "memory");
}

// To be called after the wait for products into `sums`, before they are read or written: the
// compiler takes them for ready where the product was issued, and would move the access up.
template <int Tiles>
__device__ __forceinline__ void wgmma_landed(float (&sums)[Tiles][4]) {
#pragma unroll
  for (int i = 0; i < Tiles; ++i) {
#pragma unroll
    for (int j = 0; j < 4; ++j) asm volatile("" : "+f"(sums[i][j])::"memory");
  }
}

// Has the value computed here. Without it the compiler puts what only code after the next wait
// needs behind that wait, where no product runs beside it any more.
__device__ __forceinline__ void compute_here(float& value) {
  asm volatile("" : "+f"(value)::"memory");
}

template <int Tiles>
struct Wgmma;  // specialised below: products of 8 * Tiles columns, 16 to 256 in steps of 16

// sums = or += left (64 x 16, rows along K) * right (16 x 8 Tiles) in shared memory. `Right` says
// how the right operand lies; its descriptor is made for that.
template <class Element, Major Right, int Tiles>
__device__ __forceinline__ void wgmma_shared(float (&sums)[Tiles][4], MatrixDescriptor left,
                                             MatrixDescriptor right, bool accumulate) {
  Wgmma<Tiles>::template shared<Element, Right>(sums, left, right, accumulate);
}

// The same with the left operand in registers, where it must stay until the product is waited for.
template <class Element, Major Right, int Tiles>
__device__ __forceinline__ void wgmma_registers(float (&sums)[Tiles][4], const uint32_t (&left)[4],
                                                MatrixDescriptor right, bool accumulate) {
  Wgmma<Tiles>::template registers<Element, Right>(sums, left, right, accumulate);
}

// The lists of registers that the instruction wants one by one, and in numbers.
#define AUTOFA_SUM(i) "+f"(sums[i][0]), "+f"(sums[i][1]), "+f"(sums[i][2]), "+f"(sums[i][3])
#define AUTOFA_SUMS_2 AUTOFA_SUM(0), AUTOFA_SUM(1)
#define AUTOFA_SUMS_4 AUTOFA_SUMS_2, AUTOFA_SUM(2), AUTOFA_SUM(3)
#define AUTOFA_SUMS_6 AUTOFA_SUMS_4, AUTOFA_SUM(4), AUTOFA_SUM(5)
#define AUTOFA_SUMS_8 AUTOFA_SUMS_6, AUTOFA_SUM(6), AUTOFA_SUM(7)
#define AUTOFA_SUMS_10 AUTOFA_SUMS_8, AUTOFA_SUM(8), AUTOFA_SUM(9)
#define AUTOFA_SUMS_12 AUTOFA_SUMS_10, AUTOFA_SUM(10), AUTOFA_SUM(11)
#define AUTOFA_SUMS_14 AUTOFA_SUMS_12, AUTOFA_SUM(12), AUTOFA_SUM(13)
#define AUTOFA_SUMS_16 AUTOFA_SUMS_14, AUTOFA_SUM(14), AUTOFA_SUM(15)
#define AUTOFA_SUMS_18 AUTOFA_SUMS_16, AUTOFA_SUM(16), AUTOFA_SUM(17)
#define AUTOFA_SUMS_20 AUTOFA_SUMS_18, AUTOFA_SUM(18), AUTOFA_SUM(19)
#define AUTOFA_SUMS_22 AUTOFA_SUMS_20, AUTOFA_SUM(20), AUTOFA_SUM(21)
#define AUTOFA_SUMS_24 AUTOFA_SUMS_22, AUTOFA_SUM(22), AUTOFA_SUM(23)
#define AUTOFA_SUMS_26 AUTOFA_SUMS_24, AUTOFA_SUM(24), AUTOFA_SUM(25)
#define AUTOFA_SUMS_28 AUTOFA_SUMS_26, AUTOFA_SUM(26), AUTOFA_SUM(27)
#define AUTOFA_SUMS_30 AUTOFA_SUMS_28, AUTOFA_SUM(28), AUTOFA_SUM(29)
#define AUTOFA_SUMS_32 AUTOFA_SUMS_30, AUTOFA_SUM(30), AUTOFA_SUM(31)
#define AUTOFA_NAMES_2 "%0, %1, %2, %3, %4, %5, %6, %7"
#define AUTOFA_NAMES_4 AUTOFA_NAMES_2 ", %8, %9, %10, %11, %12, %13, %14, %15"
#define AUTOFA_NAMES_6 AUTOFA_NAMES_4 ", %16, %17, %18, %19, %20, %21, %22, %23"
#define AUTOFA_NAMES_8 AUTOFA_NAMES_6 ", %24, %25, %26, %27, %28, %29, %30, %31"
#define AUTOFA_NAMES_10 AUTOFA_NAMES_8 ", %32, %33, %34, %35, %36, %37, %38, %39"
#define AUTOFA_NAMES_12 AUTOFA_NAMES_10 ", %40, %41, %42, %43, %44, %45, %46, %47"
#define AUTOFA_NAMES_14 AUTOFA_NAMES_12 ", %48, %49, %50, %51, %52, %53, %54, %55"
#define AUTOFA_NAMES_16 AUTOFA_NAMES_14 ", %56, %57, %58, %59, %60, %61, %62, %63"
#define AUTOFA_NAMES_18 AUTOFA_NAMES_16 ", %64, %65, %66, %67, %68, %69, %70, %71"
#define AUTOFA_NAMES_20 AUTOFA_NAMES_18 ", %72, %73, %74, %75, %76, %77, %78, %79"
#define AUTOFA_NAMES_22 AUTOFA_NAMES_20 ", %80, %81, %82, %83, %84, %85, %86, %87"
#define AUTOFA_NAMES_24 AUTOFA_NAMES_22 ", %88, %89, %90, %91, %92, %93, %94, %95"
#define AUTOFA_NAMES_26 AUTOFA_NAMES_24 ", %96, %97, %98, %99, %100, %101, %102, %103"
#define AUTOFA_NAMES_28 AUTOFA_NAMES_26 ", %104, %105, %106, %107, %108, %109, %110, %111"
#define AUTOFA_NAMES_30 AUTOFA_NAMES_28 ", %112, %113, %114, %115, %116, %117, %118, %119"
#define AUTOFA_NAMES_32 AUTOFA_NAMES_30 ", %120, %121, %122, %123, %124, %125, %126, %127"

#define AUTOFA_WGMMA_SHARED(TYPE, TILES, N, P0, P1, P2, P3, P4, P5)                             \
  asm volatile("{\n.reg .pred p;\n.reg .b64 a, b;\nmov.b64 a, {" P0 ", " P1                     \
               "};\n"                                                                           \
               "mov.b64 b, {" P2 ", " P3 "};\nsetp.ne.b32 p, " P4                               \
               ", 0;\n"                                                                         \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE " {" AUTOFA_NAMES_##TILES \
               "}, a, b, p, 1, 1, 0, " P5 ";\n}\n"                                              \
               : AUTOFA_SUMS_##TILES                                                            \
               : "r"(left.low), "r"(left.high), "r"(right.low), "r"(right.high),                \
                 "r"(int{accumulate}), "n"(int{Right == Major::mn})                             \
               : "memory")

#define AUTOFA_WGMMA_REGISTERS(TYPE, TILES, N, P0, P1, P2, P3, P4, P5, P6, P7)                  \
  asm volatile("{\n.reg .pred p;\n.reg .b64 b;\nmov.b64 b, {" P4 ", " P5                        \
               "};\n"                                                                           \
               "setp.ne.b32 p, " P6                                                             \
               ", 0;\n"                                                                         \
               "wgmma.mma_async.sync.aligned.m64n" #N "k16.f32." TYPE " {" AUTOFA_NAMES_##TILES \
               "}, {" P0 ", " P1 ", " P2 ", " P3 "}, b, p, 1, 1, " P7 ";\n}\n"                  \
               : AUTOFA_SUMS_##TILES                                                            \
               : "r"(left[0]), "r"(left[1]), "r"(left[2]), "r"(left[3]), "r"(right.low),        \
                 "r"(right.high), "r"(int{accumulate}), "n"(int{Right == Major::mn})            \
               : "memory")

#define AUTOFA_WGMMA(TILES, N, P0, P1, P2, P3, P4, P5, P6, P7)                                    \
  template <>                                                                                     \
  struct Wgmma<TILES> {                                                                           \
    template <class Element, Major Right>                                                         \
    static __device__ __forceinline__ void shared(float (&sums)[TILES][4], MatrixDescriptor left, \
                                                  MatrixDescriptor right, bool accumulate) {      \
      if constexpr (Element::dtype == AUTOFA_F16) {                                               \
        AUTOFA_WGMMA_SHARED("f16.f16", TILES, N, P0, P1, P2, P3, P4, P5);                         \
      } else {                                                                                    \
        AUTOFA_WGMMA_SHARED("bf16.bf16", TILES, N, P0, P1, P2, P3, P4, P5);                       \
      }                                                                                           \
    }                                                                                             \
    template <class Element, Major Right>                                                         \
    static __device__ __forceinline__ void registers(float (&sums)[TILES][4],                     \
                                                     const uint32_t (&left)[4],                   \
                                                     MatrixDescriptor right, bool accumulate) {   \
      if constexpr (Element::dtype == AUTOFA_F16) {                                               \
        AUTOFA_WGMMA_REGISTERS("f16.f16", TILES, N, P0, P1, P2, P3, P4, P5, P6, P7);              \
      } else {                                                                                    \
        AUTOFA_WGMMA_REGISTERS("bf16.bf16", TILES, N, P0, P1, P2, P3, P4, P5, P6, P7);            \
      }                                                                                           \
    }                                                                                             \
  }

AUTOFA_WGMMA(2, 16, "%8", "%9", "%10", "%11", "%12", "%13", "%14", "%15");
AUTOFA_WGMMA(4, 32, "%16", "%17", "%18", "%19", "%20", "%21", "%22", "%23");
AUTOFA_WGMMA(6, 48, "%24", "%25", "%26", "%27", "%28", "%29", "%30", "%31");
AUTOFA_WGMMA(8, 64, "%32", "%33", "%34", "%35", "%36", "%37", "%38", "%39");
AUTOFA_WGMMA(10, 80, "%40", "%41", "%42", "%43", "%44", "%45", "%46", "%47");
AUTOFA_WGMMA(12, 96, "%48", "%49", "%50", "%51", "%52", "%53", "%54", "%55");
AUTOFA_WGMMA(14, 112, "%56", "%57", "%58", "%59", "%60", "%61", "%62", "%63");
AUTOFA_WGMMA(16, 128, "%64", "%65", "%66", "%67", "%68", "%69", "%70", "%71");
AUTOFA_WGMMA(18, 144, "%72", "%73", "%74", "%75", "%76", "%77", "%78", "%79");
AUTOFA_WGMMA(20, 160, "%80", "%81", "%82", "%83", "%84", "%85", "%86", "%87");
AUTOFA_WGMMA(22, 176, "%88", "%89", "%90", "%91", "%92", "%93", "%94", "%95");
AUTOFA_WGMMA(24, 192, "%96", "%97", "%98", "%99", "%100", "%101", "%102", "%103");
AUTOFA_WGMMA(26, 208, "%104", "%105", "%106", "%107", "%108", "%109", "%110", "%111");
AUTOFA_WGMMA(28, 224, "%112", "%113", "%114", "%115", "%116", "%117", "%118", "%119");
AUTOFA_WGMMA(30, 240, "%120", "%121", "%122", "%123", "%124", "%125", "%126", "%127");
AUTOFA_WGMMA(32, 256, "%128", "%129", "%130", "%131", "%132", "%133", "%134", "%135");

#undef AUTOFA_WGMMA
#undef AUTOFA_WGMMA_REGISTERS
#undef AUTOFA_WGMMA_SHARED

}  // namespace autofa
