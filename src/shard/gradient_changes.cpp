#include "shard/gradient_changes.h"

#include <c10/util/StringUtil.h>

namespace shardstep {
namespace {

// FNV-1a, started by the first change.
uint64_t hash_on(uint64_t hash, const std::string& text) {
  if (hash == 0) hash = 0xcbf29ce484222325u;
  for (unsigned char byte : text) hash = (hash ^ byte) * 0x100000001b3u;
  return hash;
}

std::string description(const GradientChange& change) {
  const auto& [kind, param, first, second] = change;
  // Rounded to float32, a factor is the same on every rank.
  if (kind == GradientChange::kScale) return c10::str(param, " scale ", static_cast<float>(first));
  if (kind == GradientChange::kClamp) return c10::str(param, " clamp ", first, " ", second);
  return c10::str(param, " zero");
}

}  // namespace

void GradientChanges::add(const GradientChange& change) {
  digest_ = hash_on(digest_, description(change));
  log_.push_back(change);
}

void GradientChanges::add(int64_t param, const std::string& how) {
  digest_ = hash_on(digest_, c10::str(param, ' ', how));
  can_be_sent_ = false;
}

bool GradientChanges::begins_with(const std::vector<GradientChange>& log, int64_t count,
                                  uint64_t digest) {
  if (count < 0 || count > static_cast<int64_t>(log.size())) return false;
  uint64_t found = 0;
  for (int64_t i = 0; i < count; ++i) found = hash_on(found, description(log[i]));
  return found == digest;
}

}  // namespace shardstep
