#include "checkpoint/checkpoint_index.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <numeric>

#include "format/crc32.h"

namespace shardstep::detail {
namespace {

constexpr const char* kFormat = "shardstep checkpoint";
constexpr int64_t kVersion = 1;
constexpr size_t kIdDigits = 16;
constexpr size_t kChecksumDigits = 8;
const std::string kChecksumKey = R"({"crc-32":")";
const std::string kIdKey = R"("id":")";
constexpr int64_t kHeaderAlignment = 64;
constexpr int kMostRanks = 1 << 20;
static_assert(std::endian::native == std::endian::little, "safetensors files are little-endian");

std::string hex(uint32_t value) {
  std::string text(kChecksumDigits, '0');
  for (size_t i = kChecksumDigits; value != 0; value >>= 4)
    text[--i] = "0123456789abcdef"[value & 15];
  return text;
}

std::string to_text(const std::vector<uint32_t>& checksums) {
  std::string text;
  for (auto checksum : checksums) text += hex(checksum);
  return text;
}

std::vector<uint32_t> to_checksums(const std::string& text, const std::string& what) {
  TORCH_CHECK_VALUE(text.size() % kChecksumDigits == 0 &&
                        text.find_first_not_of("0123456789abcdef") == std::string::npos,
                    what, ": expected checksums of ", kChecksumDigits, " hexadecimal digits each");
  std::vector<uint32_t> checksums;
  for (size_t i = 0; i < text.size(); i += kChecksumDigits) {
    checksums.push_back(
        static_cast<uint32_t>(std::stoul(text.substr(i, kChecksumDigits), nullptr, 16)));
  }
  return checksums;
}

bool is_id(std::string_view text) {
  return text.size() == kIdDigits &&
         text.find_first_not_of("0123456789abcdef") == std::string_view::npos;
}

Range to_range(const Json& json, const std::string& what) {
  const auto ends = to_ints(json, what);
  TORCH_CHECK_VALUE(ends.size() == 2 && ends[0] <= ends[1], what,
                    ": expected a begin and an end, got ", at::IntArrayRef(ends));
  return {ends[0], ends[1]};
}

void shape_to_json(const CheckpointTensor& tensor, Json& json) {
  json["shape"] = tensor.shape;
  if (!tensor.order.empty()) json["order"] = tensor.order;
}

void shape_from_json(const Json& json, const std::string& what, CheckpointTensor& tensor) {
  tensor.shape = to_ints(member(json, "shape", what), what);
  if (json.contains("order")) tensor.order = to_ints(json["order"], what);
}

Json state_to_json(const std::map<int64_t, std::vector<std::string>>& state) {
  auto json = Json::object();
  for (const auto& [index, keys] : state) json[std::to_string(index)] = keys;
  return json;
}

int64_t to_index(const std::string& text) {
  const bool digits = !text.empty() && text.size() < 19 &&
                      text.find_first_not_of("0123456789") == std::string::npos &&
                      (text.size() == 1 || text[0] != '0');
  TORCH_CHECK_VALUE(digits, "state: expected the index of a parameter, got '", text, "'");
  return std::stoll(text);
}

void read_state(const Json& json, std::map<int64_t, std::vector<std::string>>& state) {
  for (const auto& [text, keys] : to_object(json, "state").items()) {
    std::vector<std::string> names;
    for (const auto& key : to_list(keys, "state." + text)) {
      names.push_back(to_string(key, "state." + text));
    }
    TORCH_CHECK_VALUE(state.emplace(to_index(text), std::move(names)).second, "state of parameter ",
                      text, " twice");
  }
}

Json values_to_json(const std::map<std::string, c10::IValue>& values) {
  auto json = Json::object();
  for (const auto& [name, value] : values) json[name] = to_json(value, name);
  return json;
}

void read_values(const Json& json, std::map<std::string, c10::IValue>& values) {
  for (const auto& [name, value] : to_object(json, "values").items()) {
    TORCH_CHECK_VALUE(values.emplace(name, value_from_json(value, name)).second, name, " twice");
  }
}

Json tensor_to_json(const CheckpointTensor& tensor, const std::string& name) {
  Json json{{"dtype", dtype_name(tensor.dtype, name)}};
  shape_to_json(tensor, json);
  auto& parts = json["parts"] = Json::array();
  for (const auto& part : tensor.parts) {
    parts.push_back({{"file", part.file},
                     {"elements", {part.elements.begin, part.elements.end}},
                     {"offset", part.offset},
                     {"checksums", to_text(part.checksums)}});
  }
  return json;
}

CheckpointTensor tensor_from_json(const Json& json, const std::string& name) {
  CheckpointTensor tensor;
  tensor.dtype = dtype_named(to_string(member(json, "dtype", name), name), name);
  shape_from_json(json, name, tensor);
  for (const auto& part : to_list(member(json, "parts", name), name)) {
    tensor.parts.push_back({static_cast<size_t>(to_int(member(part, "file", name), name)),
                            to_range(member(part, "elements", name), name),
                            to_int(member(part, "offset", name), name),
                            to_checksums(to_string(member(part, "checksums", name), name), name)});
  }
  return tensor;
}

Json groups_to_json(const std::vector<StateDict::ParamGroup>& groups) {
  auto json = Json::array();
  for (size_t g = 0; g < groups.size(); ++g) {
    json.push_back({{"options", to_json(groups[g].options, c10::str("param group ", g))},
                    {"params", groups[g].params}});
  }
  return json;
}

std::vector<StateDict::ParamGroup> groups_from_json(const Json& json) {
  std::vector<StateDict::ParamGroup> groups;
  for (const auto& group : to_list(json, "param_groups")) {
    const auto what = c10::str("param group ", groups.size());
    groups.push_back({values_from_json(member(group, "options", what), what),
                      to_ints(member(group, "params", what), what)});
  }
  return groups;
}

Json parameters_to_json(const std::vector<CheckpointParameter>& parameters) {
  auto json = Json::array();
  for (size_t i = 0; i < parameters.size(); ++i) {
    const auto& [name, shape, dtype] = parameters[i];
    const auto what = c10::str("parameter ", i);
    json.push_back({{"name", name ? Json(*name) : Json()},
                    {"shape", shape ? Json(*shape) : Json()},
                    {"dtype", dtype ? Json(dtype_name(*dtype, what)) : Json()}});
  }
  return json;
}

std::vector<CheckpointParameter> parameters_from_json(const Json& json) {
  std::vector<CheckpointParameter> parameters;
  for (const auto& item : to_list(json, "parameters")) {
    const auto what = c10::str("parameter ", parameters.size());
    auto& parameter = parameters.emplace_back();
    const auto& name = member(item, "name", what);
    if (!name.is_null()) parameter.name = to_string(name, what);
    const auto& shape = member(item, "shape", what);
    const auto& dtype = member(item, "dtype", what);
    if (shape.is_null() && dtype.is_null()) continue;
    parameter.shape = to_ints(shape, what);
    parameter.dtype = dtype_named(to_string(dtype, what), what);
    checked_nbytes(*parameter.shape, *parameter.dtype, what);
  }
  return parameters;
}

void check_order(const CheckpointTensor& tensor, const std::string& name) {
  if (tensor.order.empty()) return;
  auto sorted = tensor.order;
  std::sort(sorted.begin(), sorted.end());
  bool permutation = sorted.size() == tensor.shape.size();
  for (size_t i = 0; permutation && i < sorted.size(); ++i) {
    permutation = sorted[i] == static_cast<int64_t>(i);
  }
  TORCH_CHECK_VALUE(permutation, name, ": expected a permutation of ", tensor.shape.size(),
                    " axes, got ", at::IntArrayRef(tensor.order));
}

void check_text(std::string_view text) {
  const auto begin = kChecksumKey.size() + kChecksumDigits + 2;
  TORCH_CHECK_VALUE(text.starts_with(kChecksumKey) && text.size() > begin,
                    "expected the key 'crc-32' first");
  const auto rest = text.substr(begin);
  TORCH_CHECK_VALUE(
      text.substr(kChecksumKey.size(), kChecksumDigits) == hex(crc32(rest.data(), rest.size())),
      "it is damaged: it does not match its checksum");
}

// The bytes of a file that hold a part.
struct Extent {
  int64_t begin;
  int64_t end;
  const std::string* name;
};

void check_tensor(const CheckpointIndex& index, const std::string& name,
                  const CheckpointTensor& tensor, std::vector<std::vector<Extent>>& extents) {
  checked_nbytes(tensor.shape, tensor.dtype, name);
  check_order(tensor, name);
  const auto element = static_cast<int64_t>(c10::elementSize(tensor.dtype));
  int64_t next = 0;
  for (const auto& part : tensor.parts) {
    TORCH_CHECK_VALUE(part.file < index.files.size(), name, ": expected one of ",
                      index.files.size(), " files, got ", part.file);
    const auto& file = index.files[part.file];
    TORCH_CHECK_VALUE(part.elements.begin == next && part.elements.end <= tensor.numel(), name,
                      ": expected parts that follow each other up to ", tensor.numel(),
                      " elements, got one from ", part.elements.begin, " to ", part.elements.end,
                      " after ", next);
    next = part.elements.end;
    const int64_t bytes = part.elements.size() * element;
    TORCH_CHECK_VALUE(part.offset <= file.bytes && bytes <= file.bytes - part.offset, name,
                      ": expected a part inside the ", file.bytes, " bytes of ", file.name,
                      ", got ", bytes, " bytes at ", part.offset);
    const int64_t blocks = (bytes + index.block - 1) / index.block;
    TORCH_CHECK_VALUE(static_cast<int64_t>(part.checksums.size()) == blocks, name, ": expected ",
                      blocks, " checksums of a part, got ", part.checksums.size());
    if (bytes > 0) extents[part.file].push_back({part.offset, part.offset + bytes, &name});
  }
  TORCH_CHECK_VALUE(next == tensor.numel(), name, ": expected parts of all ", tensor.numel(),
                    " elements, got ", next);
}

std::string dtype_and_shape(const CheckpointTensor& tensor) {
  const at::IntArrayRef shape = tensor.shape, order = tensor.order;
  return c10::str(tensor.dtype, ' ', shape, order.empty() ? "" : c10::str(" in order ", order));
}

}  // namespace

std::string shard_prefix(const std::string& id) { return c10::str("shard-", id, "-"); }

std::string shard_name(const std::string& id, int rank) {
  return c10::str(shard_prefix(id), rank, ".safetensors");
}

std::string previous_index_name(const std::string& id) { return c10::str("index-", id, ".json"); }

std::optional<std::string> id_of_previous_index(const std::string& name) {
  constexpr std::string_view kPrefix = "index-";
  if (!name.starts_with(kPrefix)) return std::nullopt;
  auto id = name.substr(kPrefix.size(), kIdDigits);
  if (!is_id(id) || name != previous_index_name(id)) return std::nullopt;
  return id;
}

bool is_save_file(const std::string& name) {
  const std::string temporary = std::string(kIndexName) + ".tmp-";
  if (name.starts_with(temporary)) return true;
  constexpr std::string_view kShard = "shard-";
  if (!name.starts_with(kShard) || name.size() <= kShard.size() + kIdDigits) return false;
  if (!is_id(std::string_view(name).substr(kShard.size(), kIdDigits))) return false;
  auto rest = std::string_view(name).substr(kShard.size() + kIdDigits);
  const auto dot = rest.find('.');
  if (rest[0] != '-' || dot == std::string_view::npos || dot == 1) return false;
  if (rest.substr(1, dot - 1).find_first_not_of("0123456789") != std::string_view::npos) {
    return false;
  }
  rest = rest.substr(dot);
  return rest == ".safetensors" || rest.starts_with(".safetensors.tmp-");
}

ShardLayout layout_of(const ShardContent& content, const CheckpointIndex& index, int rank,
                      const std::vector<std::vector<uint32_t>>& checksums) {
  // Wide elements first, so that all of them are aligned without gaps.
  std::vector<size_t> by_width(content.parts.size());
  std::iota(by_width.begin(), by_width.end(), 0);
  auto width = [&](size_t i) { return c10::elementSize(content.parts[i].whole.dtype); };
  std::stable_sort(by_width.begin(), by_width.end(),
                   [&](size_t a, size_t b) { return width(a) > width(b); });

  Json ours{{"format", kFormat},
            {"version", kVersion},
            {"id", index.id},
            {"rank", rank},
            {"state", state_to_json(content.state)},
            {"values", values_to_json(content.values)}};
  auto& parts = ours["parts"] = Json::object();
  auto header = Json::object();
  ShardLayout layout;
  layout.offsets.resize(content.parts.size());
  int64_t end = 0;
  for (size_t i : by_width) {
    const auto& [name, whole, elements, tensor] = content.parts[i];
    const int64_t bytes = elements.size() * static_cast<int64_t>(width(i));
    // Safetensors has no memory order, so only a whole, row-major tensor has its shape.
    const bool shaped = whole.order.empty() && elements == Range{0, whole.numel()};
    header[name] = {{"dtype", dtype_name(whole.dtype, name)},
                    {"shape", shaped ? whole.shape : std::vector<int64_t>{elements.size()}},
                    {"data_offsets", {end, end + bytes}}};
    auto& part = parts[name] = {{"elements", {elements.begin, elements.end}},
                                {"checksums", to_text(checksums[i])}};
    shape_to_json(whole, part);
    layout.offsets[i] = end;
    end += bytes;
  }
  header["__metadata__"] = {{"format", "pt"}, {"shardstep", dump(ours, "shard")}};
  auto text = dump(header, "shard");
  const auto size = static_cast<int64_t>(text.size() + sizeof(uint64_t));
  text.append((kHeaderAlignment - size % kHeaderAlignment) % kHeaderAlignment, ' ');
  const uint64_t length = text.size();
  layout.header.assign(reinterpret_cast<const char*>(&length), sizeof(length));
  layout.header += text;
  for (auto& offset : layout.offsets) offset += static_cast<int64_t>(layout.header.size());
  layout.bytes = static_cast<int64_t>(layout.header.size()) + end;
  return layout;
}

void merge_shard(std::string_view text, int rank, int64_t file_bytes, CheckpointIndex& index) {
  const auto header = parse_json(text);
  const auto& metadata = member(header, "__metadata__", "header");
  const auto ours = parse_json(to_string(member(metadata, "shardstep", "header"), "header"));
  TORCH_CHECK_VALUE(
      member(ours, "id", "header") == index.id && member(ours, "rank", "header") == rank,
      "expected the shard of rank ", rank, " and checkpoint ", index.id);
  const size_t file = index.files.size();
  index.files.push_back({shard_name(index.id, rank), rank, file_bytes});
  read_state(member(ours, "state", "header"), index.state);
  read_values(member(ours, "values", "header"), index.values);
  const auto base = static_cast<int64_t>(text.size() + sizeof(uint64_t));
  for (const auto& [name, part] : to_object(member(ours, "parts", "header"), "header").items()) {
    const auto& entry = member(header, name, "header");
    CheckpointTensor tensor;
    tensor.dtype = dtype_named(to_string(member(entry, "dtype", name), name), name);
    shape_from_json(part, name, tensor);
    auto& whole = index.tensors.emplace(name, tensor).first->second;
    TORCH_CHECK_VALUE(
        whole.dtype == tensor.dtype && whole.shape == tensor.shape && whole.order == tensor.order,
        name, ": expected one dtype, shape and memory order on all ranks, got ",
        dtype_and_shape(whole), " on rank ", index.files[whole.parts.front().file].rank, " and ",
        dtype_and_shape(tensor), " on rank ", rank);
    const auto bytes = to_range(member(entry, "data_offsets", name), name);
    TORCH_CHECK_VALUE(bytes.begin <= file_bytes - base, name,
                      ": expected a position inside the file");
    whole.parts.push_back({file, to_range(member(part, "elements", name), name), base + bytes.begin,
                           to_checksums(to_string(member(part, "checksums", name), name), name)});
  }
}

void check_state(const CheckpointIndex& index) {
  const auto count = static_cast<int64_t>(index.parameters.size());
  std::vector<bool> seen(index.parameters.size());
  for (size_t g = 0; g < index.param_groups.size(); ++g) {
    for (int64_t param : index.param_groups[g].params) {
      TORCH_CHECK_VALUE(0 <= param && param < count && !seen[param], "param group ", g,
                        ": expected each of ", count, " parameters once, got ", param);
      seen[param] = true;
    }
  }
  TORCH_CHECK_VALUE(std::find(seen.begin(), seen.end(), false) == seen.end(), "expected each of ",
                    count, " parameters in a param group");
  size_t known = 0;
  for (const auto& [param, keys] : index.state) {
    TORCH_CHECK_VALUE(0 <= param && param < count, "expected state of ", count,
                      " parameters, got that of ", param);
    std::vector<std::string> sorted = keys;
    std::sort(sorted.begin(), sorted.end());
    TORCH_CHECK_VALUE(std::adjacent_find(sorted.begin(), sorted.end()) == sorted.end(),
                      "state of parameter ", param, ": expected every key once");
    for (const auto& key : keys) {
      const auto name = state_name(param, key);
      TORCH_CHECK_VALUE(index.tensors.count(name) + index.values.count(name) == 1, name,
                        ": expected a tensor or a value, got ",
                        index.tensors.count(name) != 0 ? "both" : "neither");
      ++known;
    }
  }
  size_t stored = index.values.size();
  for (const auto& [name, tensor] : index.tensors) stored += name.starts_with("state.") ? 1 : 0;
  TORCH_CHECK_VALUE(stored == known, "expected ", known, " entries of the optimizer's state, got ",
                    stored);
}

void check_index(const CheckpointIndex& index) {
  std::vector<std::vector<Extent>> extents(index.files.size());
  for (const auto& [name, tensor] : index.tensors) check_tensor(index, name, tensor, extents);
  for (size_t f = 0; f < extents.size(); ++f) {
    auto& places = extents[f];
    std::sort(places.begin(), places.end(),
              [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
    for (size_t i = 1; i < places.size(); ++i) {
      TORCH_CHECK_VALUE(places[i - 1].end <= places[i].begin, "expected separate bytes for ",
                        *places[i].name, ", got an overlap with ", *places[i - 1].name, " in ",
                        index.files[f].name);
    }
  }
  check_state(index);
}

std::string index_to_text(const CheckpointIndex& index) {
  Json json{{"format", kFormat},
            {"version", kVersion},
            {"world_size", index.world_size},
            {"stage", index.stage},
            {"sharding", index.sharding == Sharding::kElement ? "element" : "parameter"},
            {"checksum", {{"kind", "crc-32"}, {"block", index.block}}},
            {"param_groups", groups_to_json(index.param_groups)},
            {"parameters", parameters_to_json(index.parameters)},
            {"state", state_to_json(index.state)},
            {"values", values_to_json(index.values)},
            {"extra", to_json(index.extra, "extra")}};
  auto& files = json["files"] = Json::array();
  for (const auto& [name, rank, bytes] : index.files) {
    files.push_back({{"name", name}, {"rank", rank}, {"bytes", bytes}});
  }
  auto& tensors = json["tensors"] = Json::object();
  for (const auto& [name, tensor] : index.tensors) tensors[name] = tensor_to_json(tensor, name);
  if (!index.module_values.empty()) json["module_values"] = values_to_json(index.module_values);
  const auto rest = kIdKey + index.id + "\"," + dump(json, "index").substr(1) + "\n";
  return kChecksumKey + hex(crc32(rest.data(), rest.size())) + "\"," + rest;
}

bool is_index_text(std::string_view head) { return head.starts_with(kChecksumKey); }

std::optional<std::string> id_in_head(std::string_view head) {
  const auto begin = kChecksumKey.size() + kChecksumDigits + 2;
  if (!is_index_text(head) || head.size() < begin + kIdKey.size() + kIdDigits) return std::nullopt;
  const auto rest = head.substr(begin);
  const auto id = rest.substr(kIdKey.size(), kIdDigits);
  if (!rest.starts_with(kIdKey) || !is_id(id)) return std::nullopt;
  return std::string(id);
}

std::optional<std::string> id_of_index(std::string_view text) {
  const auto json = parse_json(text);
  const auto& id = to_string(member(json, "id", "index"), "id");
  return is_id(id) ? std::optional(id) : std::nullopt;
}

CheckpointIndex index_from_text(std::string_view text) {
  const auto json = parse_json(text);
  const auto format = to_object(json, "index").find("format");
  TORCH_CHECK_VALUE(format != json.end() && *format == kFormat,
                    "it is not an index of a checkpoint");
  const auto version = to_int(member(json, "version", "index"), "version");
  TORCH_CHECK_VALUE(version == kVersion, "expected version ", kVersion, ", got ", version);
  check_text(text);
  CheckpointIndex index;
  index.id = to_string(member(json, "id", "index"), "id");
  TORCH_CHECK_VALUE(is_id(index.id), "id: expected ", kIdDigits, " hexadecimal digits, got '",
                    index.id, "'");
  const auto world_size = to_int(member(json, "world_size", "index"), "world_size", 1);
  TORCH_CHECK_VALUE(world_size <= kMostRanks, "world_size: expected at most ", kMostRanks, ", got ",
                    world_size);
  index.world_size = static_cast<int>(world_size);
  const auto stage = to_int(member(json, "stage", "index"), "stage", 1);
  TORCH_CHECK_VALUE(stage <= 2, "stage: expected 1 or 2, got ", stage);
  index.stage = static_cast<int>(stage);
  const auto& sharding = to_string(member(json, "sharding", "index"), "sharding");
  TORCH_CHECK_VALUE(sharding == "element" || sharding == "parameter",
                    "sharding: expected 'element' or 'parameter', got '", sharding, "'");
  index.sharding = sharding == "element" ? Sharding::kElement : Sharding::kParameter;
  const auto& checksum = member(json, "checksum", "index");
  const auto& kind = to_string(member(checksum, "kind", "checksum"), "checksum");
  TORCH_CHECK_VALUE(kind == "crc-32", "checksum: expected 'crc-32', got '", kind, "'");
  index.block = to_int(member(checksum, "block", "checksum"), "checksum", 1);
  TORCH_CHECK_VALUE(index.block <= (1 << 30), "checksum: expected blocks of at most ", 1 << 30,
                    " bytes, got ", index.block);
  for (const auto& item : to_list(member(json, "files", "index"), "files")) {
    const auto rank = static_cast<int64_t>(index.files.size());
    index.files.push_back({to_string(member(item, "name", "file"), "file"), static_cast<int>(rank),
                           to_int(member(item, "bytes", "file"), "file")});
    const auto& file = index.files.back();
    // Also keeps names from pointing outside the directory.
    TORCH_CHECK_VALUE(to_int(member(item, "rank", "file"), "file") == rank &&
                          file.name == shard_name(index.id, static_cast<int>(rank)),
                      "expected the file ", shard_name(index.id, static_cast<int>(rank)), ", got '",
                      file.name, "'");
  }
  TORCH_CHECK_VALUE(static_cast<int64_t>(index.files.size()) == world_size, "expected ", world_size,
                    " files, got ", index.files.size());
  index.param_groups = groups_from_json(member(json, "param_groups", "index"));
  index.parameters = parameters_from_json(member(json, "parameters", "index"));
  read_state(member(json, "state", "index"), index.state);
  read_values(member(json, "values", "index"), index.values);
  for (const auto& [name, tensor] :
       to_object(member(json, "tensors", "index"), "tensors").items()) {
    index.tensors.emplace(name, tensor_from_json(tensor, name));
  }
  index.extra = value_from_json(member(json, "extra", "index"), "extra");
  if (json.contains("module_values")) read_values(json["module_values"], index.module_values);
  check_index(index);
  return index;
}

}  // namespace shardstep::detail
