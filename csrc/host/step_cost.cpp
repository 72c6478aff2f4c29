#include "step_cost.h"

#include <algorithm>
#include <cmath>
#include <stdexcept>

namespace rolltree {
namespace {

constexpr double kHalfLife = 64;  // of a step's weight, in steps: contexts grow
constexpr double kFewest = 3;     // weight of the steps that a fit needs
constexpr double kOutlier = 3;    // times as long as expected; a step that takes longer counts as one that takes so long
constexpr double kGuess[3] = {0.5, 0.2, 0.3};   // shares of a step's time: fixed, by branches, by rows; as if one step had said so
constexpr int64_t kLeastKept = 8, kMostKept = 32;  // steps for which a fit is used, an eighth of those before it

// x of a x = b, a symmetric and positive definite.
std::array<double, 3> solve_three(std::array<std::array<double, 3>, 3> a, std::array<double, 3> b) {
  for (int i = 0; i < 3; ++i)
    for (int j = i + 1; j < 3; ++j) {
      const double times = a[j][i] / a[i][i];
      for (int k = i; k < 3; ++k) a[j][k] -= times * a[i][k];
      b[j] -= times * b[i];
    }
  for (int i = 2; i >= 0; --i) {
    for (int k = i + 1; k < 3; ++k) b[i] -= a[i][k] * b[k];
    b[i] /= a[i][i];
  }
  return b;
}

}  // namespace

int Fit::size(int64_t rows) { return static_cast<int>(std::min<int64_t>((rows + kTogether - 1) / kTogether, kSizes - 1)); }

double Fit::seconds(int64_t branches, int64_t rows) const {
  return (fixed + branch * branches + row * rows) * (1 + beyond[size(rows)]);
}

void StepCost::took(int64_t branches, int64_t rows, double seconds) {
  if (const auto now = fit(branches))
    seconds = std::min(seconds, kOutlier * (now->fixed + now->branch * branches + now->row * rows));
  const Step step{static_cast<double>(branches), static_cast<double>(rows), seconds};
  if (count_ < kRemembered) steps_.push_back(step);
  else steps_[count_ % kRemembered] = step;
  ++count_;
}

std::optional<Fit> StepCost::fit(int64_t branches) {
  if (branches < 1) throw std::invalid_argument("A step has one branch at least.");
  const int size = static_cast<int>(std::lround(8 * std::log2(branches)));  // within a tenth
  const auto found = known_.find(size);
  if (found != known_.end() && found->second.fit && count_ < found->second.until) return found->second.fit;
  return (known_[size] = {count_ + std::clamp(count_ / 8, kLeastKept, kMostKept), solve(branches)}).fit;
}

std::optional<Fit> StepCost::solve(int64_t branches) const {
  const int64_t n = static_cast<int64_t>(steps_.size());
  std::vector<double> weight(n);
  double all = 0;
  Step mean{};
  for (int64_t i = 0; i < n; ++i) {
    const double age = (count_ - 1 - i) % kRemembered, apart = std::log2(std::max(steps_[i].branches, 1.0) / branches);
    const double w = weight[i] = std::exp2(-age / kHalfLife - apart * apart);
    all += w;
    mean.branches += w * steps_[i].branches, mean.rows += w * steps_[i].rows, mean.seconds += w * steps_[i].seconds;
  }
  if (all < kFewest) return std::nullopt;
  mean.branches /= all, mean.rows /= all, mean.seconds /= all;

  // of times and numbers as shares of their means; the ridge of one is the step that the guess counts as
  std::array<std::array<double, 3>, 3> square{{{1, 0, 0}, {0, 1, 0}, {0, 0, 1}}};
  std::array<double, 3> right{kGuess[0], kGuess[1], kGuess[2]};
  for (int64_t i = 0; i < n; ++i) {
    const double x[3] = {1, steps_[i].branches / mean.branches, steps_[i].rows / mean.rows};
    for (int j = 0; j < 3; ++j) {
      right[j] += weight[i] * x[j] * steps_[i].seconds / mean.seconds;
      for (int k = 0; k < 3; ++k) square[j][k] += weight[i] * x[j] * x[k];
    }
  }
  const auto share = solve_three(square, right);
  Fit fit{std::max(share[0], 0.0) * mean.seconds, std::max(share[1], 0.0) * mean.seconds / mean.branches,
          std::max(share[2], 1e-3) * mean.seconds / mean.rows};
  std::array<double, Fit::kSizes> seen{};
  for (int64_t i = 0; i < n; ++i) {
    const int size = Fit::size(static_cast<int64_t>(steps_[i].rows));
    const double line = fit.fixed + fit.branch * steps_[i].branches + fit.row * steps_[i].rows;
    fit.beyond[size] += weight[i] * (steps_[i].seconds / line - 1);
    seen[size] += weight[i];
  }
  for (int size = 0; size < Fit::kSizes; ++size) fit.beyond[size] /= seen[size] + 1;
  return fit;
}

}  // namespace rolltree
