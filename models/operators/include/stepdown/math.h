// Elementary functions of the generated kernels, for g++ (C++17) and nvcc (host and device).
//
// On the CPU every function is a straight line of arithmetic and selections, so that g++ turns loops over it
// (`#pragma omp simd`) into vector code at -O3 -fno-math-errno -fno-trapping-math. They need neither FMA nor
// -ffast-math, and are wrong with the latter: infinities are masks and NaN must stay visible. On a GPU they are
// CUDA's own functions.
//
// Largest errors, in units in the last place of the result (tests/models/operators/test_math_header.py):
//            float   double
//   exp        1       1       -inf -> 0 exactly, gradual underflow, overflow -> inf
//   erf      1.2     1.2
//   tanh     1.2       1
// NaN gives NaN, and odd functions are exactly odd, zeros included.
#pragma once

#include <cmath>
#include <cstdint>

#if defined(__FAST_MATH__)
#error "stepdown/math.h was compiled with -ffast-math, and is right only without it"
#endif

#ifndef STEPDOWN_FUNCTION
#if defined(__CUDACC__)
#define STEPDOWN_FUNCTION __host__ __device__ __forceinline__
#else
#define STEPDOWN_FUNCTION inline __attribute__((always_inline))
#endif
#endif

namespace stepdown {

namespace detail {

// Table written by tools/fit_polynomials.py.
inline constexpr float exp_tail_float[] = {
    4.99999940e-01f, 1.66665211e-01f, 4.16683815e-02f, 8.36871006e-03f,
    1.38148211e-03f,
};
inline constexpr double exp_tail_double[] = {
    5.0000000000000000e-01, 1.6666666666666682e-01, 4.1666666666666095e-02, 8.3333333333170719e-03,
    1.3888888889114577e-03, 1.9841269896306345e-04, 2.4801586927911615e-05, 2.7557234928485185e-06,
    2.7557581131167057e-07, 2.5112016421805803e-08, 2.0826776901969190e-09,
};
inline constexpr float erf_center_float[] = {
    1.28379166e-01f, -3.76126260e-01f, 1.12835854e-01f, -2.68538110e-02f,
    5.18832775e-03f, -8.01019196e-04f, 7.85385346e-05f,
};
inline constexpr double erf_center_double[] = {
    1.2837916709551259e-01, -3.7612638903183754e-01, 1.1283791670955119e-01, -2.6866170645129733e-02,
    5.2239776254220868e-03, -8.5483270218532825e-04, 1.2055332899361123e-04, -1.4925647465199580e-05,
    1.6462043409214309e-06, -1.6364614438234826e-07, 1.4792145884591756e-08, -1.2163042577722973e-09,
    8.7037917332765529e-11, -4.2228985189371866e-12,
};
inline constexpr float erf_tail_float[] = {
    -1.84960556e+00f, -2.63896751e+00f, -8.43107104e-01f, -4.15634811e-02f,
    1.00464514e-02f, -2.01196549e-03f, 2.89527467e-04f, -2.16866720e-05f,
};
inline constexpr double erf_tail_double[] = {
    -1.8496055099332482e+00, -2.6389675142347881e+00, -8.4310725635867667e-01, -4.1561098041809401e-02,
    1.0033825374412636e-02, -1.9779025679051996e-03, 2.3732248129391468e-04, 2.6277876007775931e-05,
    -2.7159115179330217e-05, 9.6089065288596237e-06, -2.0597808445345775e-06, 1.4288415261577444e-07,
    9.7541125758136657e-08, -5.2034664770721110e-08, 1.4910270043519364e-08, -2.8637381063170957e-09,
    3.6819710790100172e-10, -2.8810473682807501e-11, 1.0388722518071379e-12,
};
inline constexpr float tanh_center_float[] = {
    -3.33332956e-01f, 1.33323550e-01f, -5.38803712e-02f, 2.14881711e-02f,
    -7.94819649e-03f, 2.30281055e-03f, -3.58848105e-04f,
};
inline constexpr double tanh_center_double[] = {
    -3.3333333333332976e-01, 1.3333333333295103e-01, -5.3968253954009379e-02, 2.1869488267895330e-02,
    -8.8632325200335340e-03, 3.5921059888941466e-03, -1.4557228108604060e-03, 5.8962278683690915e-04,
    -2.3805205454261122e-04, 9.4780023999916811e-05, -3.6098934285179690e-05, 1.2350273920187904e-05,
    -3.4239937135244952e-06, 6.5573624085933577e-07, -6.2854199089827098e-08,
};
// End of the table.

// c[0] + c[1] x + c[2] x^2 + ..., by Horner's rule, unrolled.
template <int First = 0, typename T, int Count>
STEPDOWN_FUNCTION T polynomial(T x, const T (&c)[Count]) {
    if constexpr (First + 1 == Count) {
        return c[First];
    } else {
        return polynomial<First + 1>(x, c) * x + c[First];
    }
}

// What the two precisions differ in.
template <typename T>
struct Format;

template <>
struct Format<float> {
    using Bits = std::uint32_t;
    static constexpr int mantissa_bits = 23;
    // Adding this rounds to an integer and leaves the integer plus the exponent's bias in the lowest bits.
    static constexpr float round_and_bias = 12582912.0f + 127.0f;
    static constexpr float log2_e = 1.44269504e+00f;
    // ln 2 in two parts; a product of the first with any exponent is exact.
    static constexpr float ln2_high = 0x1.62e4p-1f;
    static constexpr float ln2_low = 0x1.7f7d1cp-20f;
    static constexpr float exp_lowest = -105.0f;
    static constexpr float exp_highest = 89.0f;
    static constexpr float erf_one = 4.0f;    // erf rounds to 1 from here on
    static constexpr float tanh_one = 10.0f;  // tanh rounds to 1 from here on
};

template <>
struct Format<double> {
    using Bits = std::uint64_t;
    static constexpr int mantissa_bits = 52;
    static constexpr double round_and_bias = 6755399441055744.0 + 1023.0;
    static constexpr double log2_e = 1.44269504088896340736e+00;
    static constexpr double ln2_high = 0x1.62e42fefa0000p-1;
    static constexpr double ln2_low = 0x1.cf79abc9e3b3ap-40;
    static constexpr double exp_lowest = -746.0;
    static constexpr double exp_highest = 710.0;
    static constexpr double erf_one = 6.0;
    static constexpr double tanh_one = 20.0;
};

// 2^n, given n + round_and_bias.
template <typename T>
STEPDOWN_FUNCTION T power_of_two(T biased) {
    using Bits = typename Format<T>::Bits;
    return __builtin_bit_cast(T, __builtin_bit_cast(Bits, biased) << Format<T>::mantissa_bits);
}

STEPDOWN_FUNCTION float exp_tail(float r) { return polynomial(r, exp_tail_float); }
STEPDOWN_FUNCTION double exp_tail(double r) { return polynomial(r, exp_tail_double); }

// exp(x) / 2^n and n, with n = round(x / ln 2).
template <typename T>
STEPDOWN_FUNCTION T reduced_exp(T x, T& n) {
    using F = Format<T>;
    n = (x * F::log2_e + F::round_and_bias) - F::round_and_bias;
    const T r = (x - n * F::ln2_high) - n * F::ln2_low;
    return T(1) + (r + (r * r) * exp_tail(r));
}

// exp(x) where the result is a normal number well inside the range.
template <typename T>
STEPDOWN_FUNCTION T bounded_exp(T x) {
    T n;
    const T mantissa = reduced_exp(x, n);
    return mantissa * power_of_two(n + Format<T>::round_and_bias);
}

// exp(x) for every x: the power of two is applied in two halves, each of them a normal number.
template <typename T>
STEPDOWN_FUNCTION T full_exp(T x) {
    using F = Format<T>;
    x = x < F::exp_lowest ? F::exp_lowest : x;
    x = F::exp_highest < x ? F::exp_highest : x;
    T n;
    const T mantissa = reduced_exp(x, n);
    const T biased_half = n * T(0.5) + F::round_and_bias;
    const T other_half = n - (biased_half - F::round_and_bias);
    return (mantissa * power_of_two(biased_half)) * power_of_two(other_half + F::round_and_bias);
}

}  // namespace detail

STEPDOWN_FUNCTION float exp(float x) {
#if defined(__CUDA_ARCH__)
    return ::expf(x);
#else
    return detail::full_exp(x);
#endif
}

STEPDOWN_FUNCTION double exp(double x) {
#if defined(__CUDA_ARCH__)
    return ::exp(x);
#else
    return detail::full_exp(x);
#endif
}

namespace detail {

// With m = |x|: erf(m) = m + m center(m^2) below 1, and 1 - exp(tail(m - 1)) above.
template <typename T, int CenterCount, int TailCount>
STEPDOWN_FUNCTION T full_erf(T x, const T (&center)[CenterCount], const T (&tail)[TailCount]) {
    const T magnitude = std::fabs(x);
    const T near = magnitude + magnitude * polynomial(magnitude * magnitude, center);
    const T bounded = Format<T>::erf_one < magnitude ? Format<T>::erf_one : magnitude;
    const T far = T(1) - bounded_exp(polynomial(bounded - T(1), tail));
    return std::copysign(magnitude < T(1) ? near : far, x);
}

// With m = |x|: tanh(m) = m + m^3 center(m^2) below 1, and 1 - 2 / (exp(2 m) + 1) above.
template <typename T, int CenterCount>
STEPDOWN_FUNCTION T full_tanh(T x, const T (&center)[CenterCount]) {
    const T magnitude = std::fabs(x);
    const T square = magnitude * magnitude;
    const T near = magnitude + (magnitude * square) * polynomial(square, center);
    const T bounded = Format<T>::tanh_one < magnitude ? Format<T>::tanh_one : magnitude;
    const T far = T(1) - T(2) / (bounded_exp(T(2) * bounded) + T(1));
    return std::copysign(magnitude < T(1) ? near : far, x);
}

}  // namespace detail

STEPDOWN_FUNCTION float erf(float x) {
#if defined(__CUDA_ARCH__)
    return ::erff(x);
#else
    return detail::full_erf(x, detail::erf_center_float, detail::erf_tail_float);
#endif
}

STEPDOWN_FUNCTION double erf(double x) {
#if defined(__CUDA_ARCH__)
    return ::erf(x);
#else
    return detail::full_erf(x, detail::erf_center_double, detail::erf_tail_double);
#endif
}

STEPDOWN_FUNCTION float tanh(float x) {
#if defined(__CUDA_ARCH__)
    return ::tanhf(x);
#else
    return detail::full_tanh(x, detail::tanh_center_float);
#endif
}

STEPDOWN_FUNCTION double tanh(double x) {
#if defined(__CUDA_ARCH__)
    return ::tanh(x);
#else
    return detail::full_tanh(x, detail::tanh_center_double);
#endif
}

STEPDOWN_FUNCTION float sqrt(float x) { return ::sqrtf(x); }
STEPDOWN_FUNCTION double sqrt(double x) { return ::sqrt(x); }

// The larger of two values, and `a` where they are equal or either is NaN: a NaN in `a` stays, one in `b` is dropped.
template <typename T>
STEPDOWN_FUNCTION T maximum(T a, T b) {
    return a < b ? b : a;
}

template <typename T>
STEPDOWN_FUNCTION constexpr T negative_infinity() {
    return -static_cast<T>(HUGE_VALF);
}

}  // namespace stepdown
