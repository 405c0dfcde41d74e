// The random words of dropout: Philox 4x32-10 (Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", 2011),
// for g++ (C++17) and nvcc (host and device).
//
//   key     = (low 32 bits of seed, high 32 bits of seed)
//   counter = (low 32 bits of block, high 32 bits of block << 8 | operator number, low and high 32 bits of offset)
//
// An element's word depends on its index in C order of the logical shape and on nothing else: block = index >> 2, word
// index & 3 of the four. Indices are below 2^58 and operator numbers below 2^8. The same function is written with NumPy
// in models/operators/philox.py.
#pragma once

#include <cmath>
#include <cstdint>

#ifndef STEPDOWN_FUNCTION
#if defined(__CUDACC__)
#define STEPDOWN_FUNCTION __host__ __device__ __forceinline__
#else
#define STEPDOWN_FUNCTION inline __attribute__((always_inline))
#endif
#endif

namespace stepdown {

namespace detail {

struct PhiloxState {
    std::uint32_t word0, word1, word2, word3;
};

// One round and those after it: recursion keeps the key schedule in constants that leave the loops over blocks.
template <int Rounds>
STEPDOWN_FUNCTION PhiloxState philox_rounds(PhiloxState state, std::uint32_t key0, std::uint32_t key1) {
    const std::uint64_t product0 = std::uint64_t{0xD2511F53u} * state.word0;
    const std::uint64_t product1 = std::uint64_t{0xCD9E8D57u} * state.word2;
    const PhiloxState next{
        static_cast<std::uint32_t>(product1 >> 32) ^ state.word1 ^ key0,
        static_cast<std::uint32_t>(product1),
        static_cast<std::uint32_t>(product0 >> 32) ^ state.word3 ^ key1,
        static_cast<std::uint32_t>(product0),
    };
    if constexpr (Rounds == 1) {
        return next;
    } else {
        return philox_rounds<Rounds - 1>(next, key0 + 0x9E3779B9u, key1 + 0xBB67AE85u);
    }
}

STEPDOWN_FUNCTION PhiloxState philox(
    std::int64_t seed, std::int64_t offset, std::uint32_t operator_number, std::uint64_t block) {
    const std::uint64_t seed_bits = static_cast<std::uint64_t>(seed);
    const std::uint64_t offset_bits = static_cast<std::uint64_t>(offset);
    const PhiloxState counter{
        static_cast<std::uint32_t>(block),
        static_cast<std::uint32_t>(block >> 32) << 8 | operator_number,
        static_cast<std::uint32_t>(offset_bits),
        static_cast<std::uint32_t>(offset_bits >> 32),
    };
    return philox_rounds<10>(
        counter, static_cast<std::uint32_t>(seed_bits), static_cast<std::uint32_t>(seed_bits >> 32));
}

}  // namespace detail

// The word of one element. Elements that differ only in the last two bits of their index share all but a selection:
// where a loop over them is unrolled, as `base | v` with a base that is a multiple of four, nvcc computes it once.
STEPDOWN_FUNCTION std::uint32_t philox_word(
    std::int64_t seed, std::int64_t offset, std::uint32_t operator_number, std::uint64_t index) {
    const detail::PhiloxState state = detail::philox(seed, offset, operator_number, index >> 2);
    const std::uint32_t selected = static_cast<std::uint32_t>(index) & 3u;
    const std::uint32_t low = (selected & 1u) != 0u ? state.word1 : state.word0;
    const std::uint32_t high = (selected & 1u) != 0u ? state.word3 : state.word2;
    return (selected & 2u) != 0u ? high : low;
}

// The words of elements 4 block, ..., 4 block + 3. On a CPU this is four times as fast as one word at a time.
STEPDOWN_FUNCTION void philox_block(std::int64_t seed, std::int64_t offset, std::uint32_t operator_number,
                                    std::uint64_t block, std::uint32_t* words) {
    const detail::PhiloxState state = detail::philox(seed, offset, operator_number, block);
    words[0] = state.word0;
    words[1] = state.word1;
    words[2] = state.word2;
    words[3] = state.word3;
}

// An element is kept where its word is at least this: min(round(p 2^32), 2^32 - 1), halves to even.
STEPDOWN_FUNCTION std::uint32_t dropout_threshold(double probability) {
    const double rounded = ::rint(probability * 4294967296.0);
    return rounded < 4294967295.0 ? static_cast<std::uint32_t>(rounded) : 4294967295u;
}

// What a kept value is multiplied by: 1 / (1 - p), rounded to T.
template <typename T>
STEPDOWN_FUNCTION T dropout_scale(double probability) {
    return static_cast<T>(1.0 / (1.0 - probability));
}

}  // namespace stepdown
