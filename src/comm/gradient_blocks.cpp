#include "comm/gradient_blocks.h"

#include <ATen/core/grad_mode.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <limits>

namespace shardstep::detail {
namespace {

constexpr float kLargest = 127;
constexpr auto kSmallestScale = std::numeric_limits<float>::min();  // its inverse is finite
constexpr auto kNotFinite = std::numeric_limits<float>::quiet_NaN();

int64_t blocks_of(int64_t numel) { return (numel + kBlockElements - 1) / kBlockElements; }

// Where a tensor of a message has its scales and its elements.
struct Place {
  int64_t scales = 0, elements = 0;  // byte offsets
};

std::vector<Place> places_of(const std::vector<at::Tensor>& tensors) {
  std::vector<Place> places;
  int64_t offset = 0;
  for (const auto& tensor : tensors) {
    places.push_back({offset, 0});
    offset += blocks_of(tensor.numel()) * static_cast<int64_t>(sizeof(float));
  }
  for (size_t i = 0; i < tensors.size(); ++i) {
    places[i].elements = offset;
    offset += tensors[i].numel();
  }
  return places;
}

// Compares magnitudes as integers: those of floats are in the same order, with what is not finite
// above all others, and the compiler vectorizes it.
float scale_of(const float* values, int64_t size) {
  int32_t largest = 0;
  for (int64_t i = 0; i < size; ++i) {
    const int32_t magnitude = std::bit_cast<int32_t>(values[i]) & 0x7fffffff;
    largest = largest > magnitude ? largest : magnitude;
  }
  if (largest >= 0x7f800000) return kNotFinite;
  return std::max(std::bit_cast<float>(largest) / kLargest, kSmallestScale);
}

// To the nearest, ties to even: adding this leaves no room for a fraction, and the integer in the
// low bits.
int8_t nearest(float value) {
  constexpr float kRounding = 0x1.8p23f;
  return static_cast<int8_t>(std::bit_cast<int32_t>(value + kRounding));
}

void quantize(const float* values, int64_t size, float scale, int8_t* out) {
  const float inverse = 1 / scale;
  for (int64_t i = 0; i < size; ++i) out[i] = nearest(values[i] * inverse);
}

void restore(const int8_t* values, int64_t size, float scale, float* out) {
  for (int64_t i = 0; i < size; ++i) out[i] = static_cast<float>(values[i]) * scale;
}

// Elements as floats, copied to `room` if they are of another type.
template <class T>
const float* as_floats(const T* values, int64_t size, float* room) {
  if constexpr (std::is_same_v<T, float>) {
    return values;
  } else {
    for (int64_t i = 0; i < size; ++i) room[i] = static_cast<float>(values[i]);
    return room;
  }
}

// Calls visit(block, its first element, its size, its values as floats) for the blocks of a tensor
// that have elements in [begin, end).
template <class T, class Visit>
void visit_blocks(const at::Tensor& tensor, int64_t begin, int64_t end, Visit visit) {
  const T* const values = tensor.const_data_ptr<T>();
  float room[kBlockElements];
  for (int64_t block = begin / kBlockElements; block * kBlockElements < end; ++block) {
    const int64_t first = block * kBlockElements;
    const int64_t size = std::min(kBlockElements, tensor.numel() - first);
    visit(block, first, size, as_floats(values + first, size, room));
  }
}

template <class Visit>
void for_blocks(const at::Tensor& tensor, int64_t begin, int64_t end, Visit visit) {
  if (begin >= end) return;
  switch (tensor.scalar_type()) {
    case at::kFloat:
      return visit_blocks<float>(tensor, begin, end, visit);
    case at::kDouble:
      return visit_blocks<double>(tensor, begin, end, visit);
    case at::kBFloat16:
      return visit_blocks<at::BFloat16>(tensor, begin, end, visit);
    case at::kHalf:
      return visit_blocks<at::Half>(tensor, begin, end, visit);
    default:
      TORCH_INTERNAL_ASSERT(false, "no blocks of ", tensor.scalar_type());
  }
}

// The messages of a device, by ATen's kernels.
at::Tensor to_blocks_with_aten(const std::vector<at::Tensor>& tensors) {
  std::vector<at::Tensor> scales, elements;
  for (const auto& tensor : tensors) {
    if (tensor.numel() == 0) continue;
    const int64_t blocks = blocks_of(tensor.numel());
    const auto padded =
        at::constant_pad_nd(tensor.to(at::kFloat), {0, blocks * kBlockElements - tensor.numel()})
            .view({blocks, kBlockElements});
    const auto largest = padded.abs().amax(1, /*keepdim=*/true);
    auto scale = largest.div(kLargest).clamp_min(kSmallestScale);
    scale = scale.masked_fill(largest.isfinite().logical_not(), kNotFinite);
    const auto multiples = padded.mul(scale.reciprocal()).round_().nan_to_num_(0, 0, 0);
    scales.push_back(scale.flatten().view(at::kByte));
    elements.push_back(multiples.to(at::kChar).flatten().narrow(0, 0, tensor.numel()));
    elements.back() = elements.back().view(at::kByte);
  }
  scales.insert(scales.end(), elements.begin(), elements.end());
  return scales.empty() ? at::empty({0}, tensors.front().options().dtype(at::kByte))
                        : at::cat(scales);
}

void from_blocks_with_aten(const at::Tensor& message, const Place& place, int64_t begin,
                           at::Tensor into) {
  TORCH_INTERNAL_ASSERT(begin == 0);
  const int64_t blocks = blocks_of(into.numel()), width = sizeof(float);
  // A clone, since a view as floats must be aligned.
  const auto scales = message.narrow(0, place.scales, blocks * width).clone().view(at::kFloat);
  const auto elements = message.narrow(0, place.elements, into.numel()).view(at::kChar);
  at::mul_out(into, elements.to(at::kFloat),
              scales.repeat_interleave(kBlockElements).narrow(0, 0, into.numel()));
}

// Elements of one tensor from `begin` on, which is the start of a block, as many as fit.
void restore_range(const at::Tensor& message, const Place& place, int64_t begin,
                   const at::Tensor& into) {
  if (into.numel() == 0) return;
  if (!into.is_cpu()) return from_blocks_with_aten(message, place, begin, into);
  const auto* const bytes = static_cast<const std::byte*>(message.const_data_ptr());
  const auto* const elements = reinterpret_cast<const int8_t*>(bytes + place.elements) + begin;
  const auto* scales = bytes + place.scales + begin / kBlockElements * int64_t{sizeof(float)};
  float* const out = into.mutable_data_ptr<float>();
  for (int64_t i = 0; i < into.numel(); i += kBlockElements, scales += sizeof(float)) {
    float scale = 0;
    std::memcpy(&scale, scales, sizeof(float));
    restore(elements + i, std::min(kBlockElements, into.numel() - i), scale, out + i);
  }
}

}  // namespace

int64_t bytes_in_blocks(const std::vector<at::Tensor>& tensors) {
  int64_t bytes = 0;
  for (const auto& tensor : tensors) {
    bytes += blocks_of(tensor.numel()) * static_cast<int64_t>(sizeof(float)) + tensor.numel();
  }
  return bytes;
}

at::Tensor to_blocks(const std::vector<at::Tensor>& tensors) {
  at::NoGradGuard no_grad;
  if (tensors.empty()) return at::empty({0}, at::kByte);
  if (!tensors.front().is_cpu()) return to_blocks_with_aten(tensors);
  auto message = at::empty({bytes_in_blocks(tensors)}, at::kByte);
  auto* const bytes = static_cast<std::byte*>(message.mutable_data_ptr());
  const auto places = places_of(tensors);
  for (size_t i = 0; i < tensors.size(); ++i) {
    auto* const scales = bytes + places[i].scales;
    auto* const elements = reinterpret_cast<int8_t*>(bytes + places[i].elements);
    for_blocks(tensors[i], 0, tensors[i].numel(),
               [&](int64_t block, int64_t first, int64_t size, const float* values) {
                 const float scale = scale_of(values, size);
                 std::memcpy(scales + block * int64_t{sizeof(float)}, &scale, sizeof(float));
                 quantize(values, size, scale, elements + first);
               });
  }
  return message;
}

void from_blocks(const at::Tensor& message, const std::vector<at::Tensor>& into) {
  at::NoGradGuard no_grad;
  const auto places = places_of(into);
  for (size_t i = 0; i < into.size(); ++i) restore_range(message, places[i], 0, into[i]);
}

void through_blocks(const at::Tensor& tensor, int64_t begin, const at::Tensor& into) {
  const int64_t end = begin + into.numel();
  float* const out = into.mutable_data_ptr<float>();
  for_blocks(tensor, begin, end, [&](int64_t, int64_t first, int64_t size, const float* values) {
    const float scale = scale_of(values, size);
    const int64_t skipped = std::max<int64_t>(0, begin - first);
    const int64_t taken = std::min(size, end - first) - skipped;
    int8_t multiples[kBlockElements];
    quantize(values + skipped, taken, scale, multiples);
    restore(multiples, taken, scale, out + first + skipped - begin);
  });
}

double sum_blocks_in_rank_order(const std::vector<at::Tensor>& messages,
                                const std::vector<at::Tensor>& into, const SumOptions& options) {
  at::NoGradGuard no_grad;
  constexpr int64_t kCached = 64 * kBlockElements;  // what stays in the caches
  auto plain = options;
  plain.rounded_to.reset();
  const auto places = places_of(into);
  double squares = 0;
  std::vector<at::Tensor> room(messages.size());
  for (size_t i = 0; i < into.size(); ++i) {
    const int64_t chunk = into[i].is_cpu() ? kCached : std::max<int64_t>(1, into[i].numel());
    for (int64_t begin = 0; begin < into[i].numel(); begin += chunk) {
      const int64_t size = std::min(chunk, into[i].numel() - begin);
      std::vector<at::Tensor> terms;
      for (size_t m = 0; m < messages.size(); ++m) {
        if (!room[m].defined() || room[m].numel() < size) {
          room[m] = at::empty({std::max(size, chunk)}, into[i].options().dtype(at::kFloat));
        }
        terms.push_back(room[m].narrow(0, 0, size));
        restore_range(messages[m], places[i], begin, terms.back());
      }
      squares += sum_in_rank_order(terms, into[i].narrow(0, begin, size), plain);
    }
  }
  return squares;
}

}  // namespace shardstep::detail
