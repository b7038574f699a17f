#include "checkpoint/fuzz/mutate.h"

#include <limits>
#include <vector>

namespace shardstep::test {
namespace {

using Json = nlohmann::json;

void flip_bits(std::string& bytes, Random& random) {
  for (size_t count = 1 + draw(random, 4); count > 0; --count) {
    bytes[draw(random, bytes.size())] ^= static_cast<char>(1 << draw(random, 8));
  }
}

void overwrite(std::string& bytes, Random& random) {
  const char value = std::string("\0\xff 9{}[]\",-", 11)[draw(random, 11)];
  const size_t begin = draw(random, bytes.size());
  bytes.replace(begin, std::min<size_t>(1 + draw(random, 16), bytes.size() - begin),
                1 + draw(random, 16), value);
}

// A stretch of the file to another place in it, with or without what was there.
void splice(std::string& bytes, Random& random) {
  const size_t from = draw(random, bytes.size());
  const auto stretch = bytes.substr(from, 1 + draw(random, 256));
  const size_t to = draw(random, bytes.size());
  bytes.replace(to, draw(random, 2) * std::min(stretch.size(), bytes.size() - to), stretch);
}

void collect(Json& json, std::vector<Json*>& nodes) {
  nodes.push_back(&json);
  if (json.is_structured()) {
    for (auto& child : json) collect(child, nodes);
  }
}

Json odd_value(Random& random) {
  using Limits = std::numeric_limits<int64_t>;
  static const std::vector<Json> kValues = {
      nullptr,
      true,
      0,
      -1,
      1,
      7,
      int64_t{1} << 31,
      int64_t{1} << 40,
      int64_t{1} << 62,
      Limits::max(),
      Limits::min(),
      std::numeric_limits<uint64_t>::max(),
      0.5,
      -1e308,
      "",
      "x",
      "../../../../etc/passwd",
      std::string("a\0b", 3),
      std::string(300, 'f'),
      Json::array(),
      Json::object(),
      Json::array({0, Limits::max()}),
      Json::array({Limits::max(), Limits::max(), Limits::max()}),
      Json::array({-1, 1}),
      Json::object({{"tuple", Json::array({1, 2})}}),
      Json::object({{"dict", Json::array({Json::array({"a", 1})})}}),
      Json::object({{"double", "nan"}}),
      Json::object({{"tensor", {{"dtype", "F32"}, {"shape", {1 << 30}}, {"bytes", ""}}}}),
  };
  return kValues[draw(random, kValues.size())];
}

// Many levels, which a careless reader climbs down one stack frame each.
Json deep(Random& random) {
  Json json = 1;
  for (size_t level = draw(random, 3000); level > 0; --level) {
    auto outer = Json::array();
    outer.push_back(std::move(json));
    json = std::move(outer);
  }
  return json;
}

void drop_child(Json& json, Random& random) {
  if (!json.is_structured() || json.empty()) return;
  auto child = json.begin();
  std::advance(child, draw(random, json.size()));
  json.erase(child);
}

void add_child(Json& json, Random& random) {
  if (json.is_array()) {
    json.push_back(json.empty() || draw(random, 2) == 0 ? odd_value(random)
                                                        : json[draw(random, json.size())]);
  } else if (json.is_object()) {
    json["unheard of"] = odd_value(random);
  }
}

}  // namespace

size_t draw(Random& random, size_t count) { return random() % count; }

std::string mutate_bytes(std::string bytes, Random& random) {
  if (bytes.empty()) return "{";
  switch (draw(random, 6)) {
    case 0:
      bytes.resize(draw(random, bytes.size()));
      break;
    case 1:
      bytes.append(1 + draw(random, 64), '\0');
      break;
    case 2:
      overwrite(bytes, random);
      break;
    case 3:
      splice(bytes, random);
      break;
    default:
      flip_bits(bytes, random);
  }
  return bytes;
}

Json mutate_json(Json json, Random& random) {
  for (size_t count = 1 + draw(random, 2); count > 0; --count) {
    std::vector<Json*> nodes;
    collect(json, nodes);
    auto& node = *nodes[draw(random, nodes.size())];
    switch (draw(random, 8)) {
      case 0:
        drop_child(node, random);
        break;
      case 1:
        add_child(node, random);
        break;
      case 2:
        node = Json(*nodes[draw(random, nodes.size())]);
        break;
      case 3:
        if (draw(random, 8) == 0) node = deep(random);
        break;
      case 4:
        if (node.is_number_integer()) node = node.get<int64_t>() + (draw(random, 2) != 0 ? 1 : -1);
        break;
      default:
        node = odd_value(random);
    }
  }
  return json;
}

}  // namespace shardstep::test
