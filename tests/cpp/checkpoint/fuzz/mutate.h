#pragma once

// Damage to files and JSON, drawn from a generator: the same seed gives the same damage.

#include <nlohmann/json.hpp>
#include <random>
#include <string>

namespace shardstep::test {

using Random = std::mt19937_64;

// A number from 0 to count - 1. REQUIRES: count > 0.
size_t draw(Random& random, size_t count);

// Bits flipped, bytes overwritten, cut off, taken out, doubled, or moved.
std::string mutate_bytes(std::string bytes, Random& random);

// Values replaced by others, by huge and negative numbers and by other types, fields dropped, added
// and swapped; always valid JSON.
nlohmann::json mutate_json(nlohmann::json json, Random& random);

}  // namespace shardstep::test
