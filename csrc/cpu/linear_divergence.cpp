// Row kernels of linear_divergence: two tiles of logits [C, V], the student's and the teacher's
// (kernels/linear_divergence/reference.py and kinds.py have the formulas).
//
// A row of both is read three times, while it is in the cache: for the maxima and sums of weights, which are kept; for the
// summands of the divergence and its slopes, written over the teacher's weights; and, with a gradient, for that. Only the first
// takes exponentials for every kind of divergence; a mixture takes one more and a logarithm. One thread per run of rows; a
// row's result depends on that row alone.
//
// NaN and +inf make their own row NaN; -inf is a logit of probability zero. A summand whose probability is zero is zero.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>
#include <torch/csrc/stable/tensor.h>
#include <torch/headeronly/core/ScalarType.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <vector>

#include "logits.h"

namespace {

using torch::stable::Tensor;

using namespace rolltree::softmax;

enum class Kind { kForwardKl, kReverseKl, kJsd, kSkewForwardKl, kSkewReverseKl, kTotalVariation, kCount };

inline Vec<float> logarithm(Vec<float> x) { return rolltree::log_positive(x); }

inline Vec<double> logarithm(Vec<double> x) {
  for (int64_t i = 0; i < kLanes<double>; ++i) x[i] = std::log(x[i]);
  return x;
}

// One model's row: z - z of the greatest logit is (x - top) / T.
template <class T>
struct Row {
  const T* x;
  T top, inverse_temperature;
  Sums sums;

  Row(const Rows<T, T>& tile, int64_t i, T* scratch, T* weights) : x(tile.capped(i, scratch)) {
    const T most = maximum(x, tile.width);
    top = most == -kInfinity<T> ? T(0) : most;
    inverse_temperature = tile.inverse_temperature(i);
    sums = sum_weights<T, true, false, true>(x, tile.width, top, inverse_temperature, weights);
  }
};

// e^x - 1 - x for |x| <= 1, by its series, whose terms do not cancel.
template <class T>
inline Vec<T> excess(Vec<T> x) {
  Vec<T> sum = T(1) - Vec<T>{};
  for (int k = sizeof(T) == 4 ? 11 : 19; k > 2; --k) sum = sum * x * (T(1) / k) + T(1);
  return sum * x * x * T(0.5);
}

// A summand of KL(a || b): b - a + a log (a / b), which is not negative. Differences of a and b add up to 0; without them
// summands of almost equal distributions, which are of the size of log (a / b), would cancel to the size of its square.
template <class T>
inline Vec<T> of_kl(Vec<T> a, Vec<T> b, Vec<T> log_ratio) {
  const auto near = (log_ratio < 1) & (log_ratio > -1);
  const Vec<T> zero{}, within = near ? log_ratio : zero;
  return near ? a * excess<T>(-within) : (b - a) + (a == 0 ? zero : a * log_ratio);
}

// A summand phi of the divergence, and the slope q dphi/dq without the constant of dphi/dq.
template <class T>
struct Summand {
  Vec<T> phi, slope;
};

// `p`, `q`: probabilities of teacher and student; `gap`: log q - log p; `share`: of p in the mixture m.
template <class T, Kind kKind>
inline Summand<T> summand(Vec<T> p, Vec<T> q, Vec<T> gap, T share) {
  const Vec<T> zero{};
  const auto times = [&](Vec<T> probability, Vec<T> log) { return probability == 0 ? zero : probability * log; };
  if constexpr (kKind == Kind::kForwardKl) return {of_kl<T>(p, q, -gap), -p};
  if constexpr (kKind == Kind::kReverseKl) return {of_kl<T>(q, p, gap), times(q, gap)};
  if constexpr (kKind == Kind::kTotalVariation) {
    const Vec<T> d = q == p ? zero : q - p, half = T(0.5) * q;  // products of d may be contracted, those of q and p not
    return {T(0.5) * (d < 0 ? -d : d), q > p ? half : q < p ? -half : d};
  }
  // log m over the larger of the two, whose share of m is at least the smaller share: no sum of logarithms cancels
  const auto more = gap > 0;
  const Vec<T> size = more ? gap : -gap, part = more ? T(1) - share - zero : share - zero;
  const Vec<T> negligible = -Vector<T>::lowest - zero;
  const Vec<T> ratio = size > negligible ? zero : exponential(-size);
  const Vec<T> least = std::numeric_limits<T>::min() - zero, over = part + (T(1) - part) * ratio;
  const Vec<T> log_m = over == over ? logarithm(over < least ? least : over) : over;
  const Vec<T> p_of_m = more ? -size - log_m : -log_m;  // log (p / m)
  const Vec<T> q_of_m = more ? -log_m : -size - log_m;
  const Vec<T> m = share * p + (1 - share) * q;
  if constexpr (kKind == Kind::kJsd)
    return {share * of_kl<T>(p, m, p_of_m) + (1 - share) * of_kl<T>(q, m, q_of_m), (1 - share) * times(q, q_of_m)};
  const Vec<T> over_m = q / (m < least ? least : m);
  if constexpr (kKind == Kind::kSkewForwardKl) return {of_kl<T>(p, m, p_of_m), -(1 - share) * p * over_m};
  return {of_kl<T>(q, m, q_of_m), times(q, q_of_m) - (1 - share) * q * over_m};
}

struct Totals {
  double phi = 0, slope = 0;
};

// Writes the slopes over `teacher`, the teacher's weights, and the student's probabilities over `student`.
template <class T, Kind kKind>
Totals divergence(const Row<T>& s, const Row<T>& t, T share, int64_t width, T* student, T* teacher) {
  Totals totals;
  const T to_q = static_cast<T>(1 / s.sums.weights), to_p = static_cast<T>(1 / t.sums.weights);
  const T apart = static_cast<T>(t.sums.log() - s.sums.log());
  for (int64_t begin = 0; begin < width; begin += kBlock<T>) {
    const int64_t end = std::min(begin + kBlock<T>, width);
    Vec<T> phi[kParts]{}, slope[kParts]{};
    for (int64_t j = begin, part = 0; j < end; j += kLanes<T>, part = (part + 1) % kParts) {
      const int64_t n = end - j;
      const Vec<T> q = load_some(student + j, n, T(0)) * to_q, p = load_some(teacher + j, n, T(0)) * to_p;
      const Vec<T> of_q = (load_some(s.x + j, n, s.top) - s.top) * s.inverse_temperature;
      const Vec<T> of_p = (load_some(t.x + j, n, t.top) - t.top) * t.inverse_temperature;
      const Summand<T> value = summand<T, kKind>(p, q, (of_q - of_p) + apart, share);
      phi[part] += value.phi;
      slope[part] += value.slope;
      store_some<T>(student + j, q, n);
      store_some<T>(teacher + j, value.slope, n);
    }
    totals.phi += total<T>(phi);
    totals.slope += total<T>(slope);
  }
  return totals;
}

// out = (slope - q K) factor dz/du, K the sum of slopes. `x` may be `out`.
template <class T>
void write_gradient(const T* x, const T* q, const T* slope, T sum, T factor, T softcap, int64_t width, T* out) {
  for (int64_t j = 0; j < width; j += kLanes<T>) {
    const int64_t n = width - j;
    Vec<T> g = (load_some(slope + j, n, T(0)) - load_some(q + j, n, T(0)) * sum) * factor;
    if (softcap != 0) {
      const Vec<T> t = load_some(x + j, n, T(0)) / softcap;
      g *= 1 - t * t;
    }
    store_some<T>(out + j, g, n);
  }
}

template <class T, Kind kKind>
void run(
    const Rows<T, T>& student, const Rows<T, T>& teacher, T share, const T* factor, T* divergences, T* entropy,
    T* teacher_entropy, T* out) {
  const int64_t width = student.width;
  torch::stable::parallel_for(0, student.rows, student.grain(), [&](int64_t from, int64_t to) {
    std::vector<T> scratch(4 * width);
    T* const weights = scratch.data();
    T* const teacher_weights = weights + width;
    for (int64_t i = from; i < to; ++i) {
      const Row<T> s(student, i, weights + 2 * width, weights), t(teacher, i, weights + 3 * width, teacher_weights);
      const Totals totals = divergence<T, kKind>(s, t, share, width, weights, teacher_weights);
      divergences[i] = static_cast<T>(totals.phi);
      entropy[i] = static_cast<T>(s.sums.entropy());
      teacher_entropy[i] = static_cast<T>(t.sums.entropy());
      if (out)
        write_gradient<T>(
            s.x, weights, teacher_weights, static_cast<T>(totals.slope), factor[i] * s.inverse_temperature,
            student.softcap, width, out + i * width);
    }
  });
}

template <class T, int kKind = 0>
auto kernel_of(int64_t kind) {
  if constexpr (kKind + 1 < static_cast<int>(Kind::kCount))
    if (kind != kKind) return kernel_of<T, kKind + 1>(kind);
  return run<T, static_cast<Kind>(kKind)>;
}

template <class T>
Rows<T, T> rows_of(const Tensor& logits, const Tensor& bias, const Tensor& temperature, double softcap) {
  STD_TORCH_CHECK(logits.is_contiguous(), "logits must be contiguous");
  return {
      static_cast<const T*>(logits.data_ptr()),
      logits.sizes()[0],
      logits.sizes()[1],
      bias.numel() ? static_cast<const T*>(bias.data_ptr()) : nullptr,
      static_cast<const T*>(temperature.data_ptr()),
      temperature.stride(0),
      static_cast<T>(softcap)};
}

void divergence_rows(
    Tensor logits, Tensor bias, Tensor temperature, double softcap, Tensor teacher_logits, Tensor teacher_bias,
    Tensor teacher_temperature, double teacher_softcap, int64_t kind, double share, Tensor factor, Tensor divergence,
    Tensor entropy, Tensor teacher_entropy, Tensor out) {
  using torch::headeronly::ScalarType;
  const ScalarType type = logits.scalar_type();
  STD_TORCH_CHECK(type == ScalarType::Float || type == ScalarType::Double, "logits must be fp32 or fp64");
  for (const Tensor& t : {teacher_logits, temperature, teacher_temperature, factor, divergence, entropy, teacher_entropy, out})
    STD_TORCH_CHECK(t.scalar_type() == type, "tensors must have the dtype of logits");
  STD_TORCH_CHECK(
      teacher_logits.sizes()[0] == logits.sizes()[0] && teacher_logits.sizes()[1] == logits.sizes()[1],
      "both tiles must have one shape");
  STD_TORCH_CHECK(factor.is_contiguous() && out.is_contiguous(), "factor and out must be contiguous");
  const auto call = [&](auto zero) {
    using T = decltype(zero);
    kernel_of<T>(kind)(
        rows_of<T>(logits, bias, temperature, softcap),
        rows_of<T>(teacher_logits, teacher_bias, teacher_temperature, teacher_softcap), static_cast<T>(share),
        static_cast<const T*>(factor.data_ptr()), static_cast<T*>(divergence.data_ptr()),
        static_cast<T*>(entropy.data_ptr()), static_cast<T*>(teacher_entropy.data_ptr()),
        out.numel() ? static_cast<T*>(out.data_ptr()) : nullptr);
  };
  type == ScalarType::Float ? call(float{}) : call(double{});
}

}  // namespace

STABLE_TORCH_LIBRARY_FRAGMENT(rolltree_cpu, m) {
  m.def(
      "divergence_rows(Tensor logits, Tensor bias, Tensor temperature, float softcap, Tensor teacher_logits, "
      "Tensor teacher_bias, Tensor teacher_temperature, float teacher_softcap, int kind, float share, Tensor factor, "
      "Tensor(a!) divergence, Tensor(b!) entropy, Tensor(c!) teacher_entropy, Tensor(d!) out) -> ()");
}

STABLE_TORCH_LIBRARY_IMPL(rolltree_cpu, CPU, m) {
  m.impl("divergence_rows", TORCH_BOX(&divergence_rows));
}
