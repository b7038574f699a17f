#pragma once

// Stage 2: the changes that a rank has made to its gradients since they were last summed or
// forgotten. Ranks compare them by a digest; those that can be sent are kept, so that a rank that
// has joined can repeat what the others did.
// Thread safety: one thread at a time. Nothing here is collective.

#include <cstdint>
#include <string>
#include <vector>

namespace shardstep {

// As it travels between ranks.
struct GradientChange {
  enum Kind : int64_t { kScale, kClamp, kZero };
  int64_t kind = kScale;
  int64_t param = 0;
  double first = 0;   // factor; minimum; of kZero, how many unsettled rounds there were
  double second = 0;  // maximum
};

class GradientChanges {
 public:
  void add(const GradientChange& change);
  // A change that cannot be sent.
  void add(int64_t param, const std::string& how);
  void clear() { *this = {}; }

  // Of all changes, in order; 0 if there are none.
  uint64_t digest() const { return digest_; }
  // How many there are; -1 if some of them cannot be sent.
  int64_t count() const { return can_be_sent_ ? static_cast<int64_t>(log_.size()) : -1; }
  const std::vector<GradientChange>& log() const { return log_; }

  // Whether the first `count` changes of a log have this digest. `count` may be any number.
  static bool begins_with(const std::vector<GradientChange>& log, int64_t count, uint64_t digest);

 private:
  uint64_t digest_ = 0;
  std::vector<GradientChange> log_;
  bool can_be_sent_ = true;
};

}  // namespace shardstep
