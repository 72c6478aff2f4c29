// What a step costs by its branches and rows, learned from the steps there are.
//
// Seconds of a step as fixed + a branches + b rows, fitted to recent steps of about as many branches, and by how much steps of
// some numbers of rows are above or below that line: products compute rows together, so times do not lie on one.
//
// Steps without drafts alone cannot tell branches from rows: then a guess of the shares decides, so that drafts that were not
// worth it for long are tried again.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <unordered_map>
#include <vector>

namespace rolltree {

struct Fit {
  static constexpr int kTogether = 8;  // rows that are taken for one size
  static constexpr int kSizes = 65;    // sizes that are told apart

  double fixed, branch, row;            // seconds
  std::array<double, kSizes> beyond{};  // the share by which steps of each size are above the line

  double seconds(int64_t branches, int64_t rows) const;
  // Of a step without drafts, by which it grows with the branches' rows; there are `others` besides.
  double share(int64_t branches, int64_t others) const { return branches * row / seconds(branches, branches + others); }
  static int size(int64_t rows);
};

class StepCost {
 public:
  static constexpr int kRemembered = 256;  // steps

  void took(int64_t branches, int64_t rows, double seconds);
  std::optional<Fit> fit(int64_t branches);  // of steps of so many branches; nothing where too little is known

 private:
  struct Step {
    double branches, rows, seconds;
  };
  struct Known {
    int64_t until;  // the step from which on it is fitted anew
    std::optional<Fit> fit;
  };
  std::optional<Fit> solve(int64_t branches) const;

  std::vector<Step> steps_;  // the last ones, in a ring
  int64_t count_ = 0;
  std::unordered_map<int, Known> known_;  // by about how many branches
};

}  // namespace rolltree
