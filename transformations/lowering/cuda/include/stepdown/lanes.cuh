// What the lanes of a row do together in generated CUDA kernels: vector accesses, reductions over a row and over rows.
#pragma once

#include <cstdint>

#include <cuda_bf16.h>
#include <cuda_fp16.h>

namespace stepdown {

// Between narrow types through float, which holds all of them; double only where both sides are wide.
template <typename To, typename From>
__device__ __forceinline__ To converted(From value) {
    if constexpr (sizeof(From) == 8 && sizeof(To) >= 4) {
        return static_cast<To>(value);
    } else {
        return static_cast<To>(static_cast<float>(value));
    }
}

template <int Bytes>
struct Words;
template <>
struct Words<16> { using type = uint4; };
template <>
struct Words<8> { using type = uint2; };
template <>
struct Words<4> { using type = std::uint32_t; };
template <>
struct Words<2> { using type = std::uint16_t; };
template <>
struct Words<1> { using type = std::uint8_t; };

// Elements of a type that one access of up to 16 bytes moves, of Count that lie side by side.
template <int Count, typename T>
struct Vector {
    static constexpr int elements = Count * static_cast<int>(sizeof(T)) <= 16 ? Count : 16 / static_cast<int>(sizeof(T));
    using Access = typename Words<elements * static_cast<int>(sizeof(T))>::type;
    union {
        Access access;
        T values[elements];
    };
    __device__ __forceinline__ Vector() {}
};

// Count elements from aligned memory into registers of another type.
template <int Count, typename From, typename To>
__device__ __forceinline__ void load_vector(const From *memory, To *registers) {
    using Part = Vector<Count, From>;
#pragma unroll
    for (int first = 0; first < Count; first += Part::elements) {
        Part part;
        part.access = *reinterpret_cast<const typename Part::Access *>(memory + first);
#pragma unroll
        for (int i = 0; i < Part::elements; ++i) registers[first + i] = converted<To>(part.values[i]);
    }
}

template <int Count, typename From, typename To>
__device__ __forceinline__ void store_vector(const From *registers, To *memory) {
    using Part = Vector<Count, To>;
#pragma unroll
    for (int first = 0; first < Count; first += Part::elements) {
        Part part;
#pragma unroll
        for (int i = 0; i < Part::elements; ++i) part.values[i] = converted<To>(registers[first + i]);
        *reinterpret_cast<typename Part::Access *>(memory + first) = part.access;
    }
}

struct Sum {
    template <typename T>
    static __device__ __forceinline__ T combine(T a, T b) { return a + b; }
};
struct Maximum {
    template <typename T>
    static __device__ __forceinline__ T combine(T a, T b) { return a != a || a > b ? a : b; }
};

// The value of all lanes of a row, on each of them. Lanes of a row follow each other in the block, and `row` numbers
// the block's rows; a row of more than a warp has a barrier of its own, so that rows may end at different times.
template <typename Operation, int Lanes, int Rows, typename T>
__device__ __forceinline__ T over_lanes(T value, int row) {
    constexpr int width = Lanes < 32 ? Lanes : 32;
    const unsigned lane = threadIdx.x & 31u;
    const unsigned mask = width == 32 ? 0xffffffffu : ((1u << width) - 1u) << (lane & ~(width - 1u));
#pragma unroll
    for (int distance = width / 2; distance > 0; distance /= 2) {
        value = Operation::combine(value, __shfl_xor_sync(mask, value, distance, width));
    }
    if constexpr (Lanes > 32) {
        constexpr int warps = Lanes / 32;
        __shared__ T parts[Rows * warps];
        const int warp = static_cast<int>(threadIdx.x) / 32;
        asm volatile("bar.sync %0, %1;" ::"r"(row + 1), "r"(Lanes) : "memory");  // the last values were read
        if (lane == 0) parts[row * warps + warp] = value;
        asm volatile("bar.sync %0, %1;" ::"r"(row + 1), "r"(Lanes) : "memory");
        value = parts[row * warps];
#pragma unroll
        for (int other = 1; other < warps; ++other) value = Operation::combine(value, parts[row * warps + other]);
    }
    return value;
}

// The sum of the values that the threads of one column hold; blocks are 32 columns wide and 32 threads high.
template <typename T>
__device__ __forceinline__ T over_column(T value) {
    __shared__ T parts[32][33];
    __shared__ T sums[32];
    __syncthreads();  // the last values were read
    parts[threadIdx.y][threadIdx.x] = value;
    __syncthreads();
    T other = parts[threadIdx.x][threadIdx.y];
#pragma unroll
    for (int distance = 16; distance > 0; distance /= 2) other += __shfl_xor_sync(0xffffffffu, other, distance);
    if (threadIdx.x == 0) sums[threadIdx.y] = other;
    __syncthreads();
    return sums[threadIdx.x];
}

}  // namespace stepdown
