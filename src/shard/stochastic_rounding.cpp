#include "shard/stochastic_rounding.h"

#include <ATen/CPUGeneratorImpl.h>
#include <ATen/Parallel.h>

#include <bit>
#include <cmath>
#include <mutex>

#include "shard/bucket.h"

namespace shardstep {
namespace {

// A mixer of 64 bits after splitmix64.
uint64_t mixed(uint64_t x) {
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  return x ^ (x >> 31);
}

// The noise of an element is a hash of 32 bits of its place, with two keys.
struct Keys {
  uint32_t place, middle;
};

constexpr uint32_t kFirstFactor = 0x21f0aaad, kSecondFactor = 0x735a2d97;

Keys keys_of(const RoundingNoise& noise) {
  const auto key = mixed(noise.seed + mixed(static_cast<uint64_t>(noise.param) + 1));
  return {static_cast<uint32_t>(key), static_cast<uint32_t>(key >> 32)};
}

// 16 random bits.
uint32_t noise_of(uint32_t place, Keys keys) {
  uint32_t x = place ^ keys.place;
  x = (x ^ (x >> 16)) * kFirstFactor;
  x ^= keys.middle;
  x = (x ^ (x >> 15)) * kSecondFactor;
  return (x ^ (x >> 15)) >> 16;
}

uint16_t rounded(float value, uint32_t noise) {
  if (std::isnan(value)) return at::BFloat16(value).x;  // noise could make it infinite, or 0
  return static_cast<uint16_t>((std::bit_cast<uint32_t>(value) + noise) >> 16);
}

// An unsigned shift of 32-bit integers, of which ATen has the signed one only.
at::Tensor shifted(const at::Tensor& x, int64_t by) {
  return x.bitwise_right_shift(by).bitwise_and_((int64_t{1} << (32 - by)) - 1);
}

int64_t as_signed(uint32_t x) { return static_cast<int32_t>(x); }

}  // namespace

uint64_t draw_rounding_seed() {
  auto generator = at::detail::getDefaultCPUGenerator();
  const std::lock_guard lock(generator.mutex());
  return at::check_generator<at::CPUGeneratorImpl>(generator)->random64();
}

void round_stochastically(const at::Tensor& wide, const at::Tensor& narrow,
                          const RoundingNoise& noise) {
  if (!wide.is_cpu()) return round_stochastically_by_ops(wide, narrow, noise);
  constexpr int64_t kPerThread = 1 << 15;
  const auto from = flat_view(wide), to = flat_view(narrow);
  const auto* source = from.const_data_ptr<float>();
  auto* target = to.mutable_data_ptr<at::BFloat16>();
  const auto keys = keys_of(noise);
  const auto first = static_cast<uint32_t>(noise.first);
  at::parallel_for(0, from.numel(), kPerThread, [&](int64_t begin, int64_t end) {
    for (int64_t i = begin; i < end; ++i) {
      target[i].x = rounded(source[i], noise_of(first + static_cast<uint32_t>(i), keys));
    }
  });
}

void round_stochastically_by_ops(const at::Tensor& wide, const at::Tensor& narrow,
                                 const RoundingNoise& noise) {
  at::NoGradGuard no_grad;
  const auto from = flat_view(wide);
  const auto keys = keys_of(noise);
  auto x = at::arange(noise.first, noise.first + from.numel(), from.options().dtype(at::kLong))
               .to(at::kInt)
               .bitwise_xor_(as_signed(keys.place));
  x.bitwise_xor_(shifted(x, 16)).mul_(as_signed(kFirstFactor));
  x.bitwise_xor_(as_signed(keys.middle));
  x.bitwise_xor_(shifted(x, 15)).mul_(as_signed(kSecondFactor));
  x.bitwise_xor_(shifted(x, 15));
  const auto bits = from.view(at::kInt).add(shifted(x, 16)).bitwise_and_(as_signed(0xffff0000));
  flat_view(narrow).copy_(at::where(from.isnan(), from, bits.view(at::kFloat)));
}

TemporaryCopy::TemporaryCopy(const at::Tensor& own)
    : nothing_(at::empty_strided(own.sizes(), own.strides(), own.options().dtype(at::kFloat))) {
  auto* const storage = nothing_.storage().unsafeGetStorageImpl();
  storage->set_data_ptr_noswap(c10::DataPtr(nullptr, storage->device()));
  storage->set_nbytes(0);
  storage->release_data_and_set_meta_custom_data_ptr_error_msg_(
      "shardstep: with stochastic rounding, the local optimizer's parameters have values during "
      "step() only; read the model's");
  tensor_ = nothing_.detach();
}

void TemporaryCopy::widen(const at::Tensor& own) {
  at::NoGradGuard no_grad;
  if (!has_memory_) {
    tensor_.set_data(at::empty_strided(own.sizes(), own.strides(), nothing_.options()));
  }
  has_memory_ = true;
  tensor_.detach().copy_(own);
}

void TemporaryCopy::round_into(const at::Tensor& own, const RoundingNoise& noise) {
  round_stochastically(tensor_.detach(), own, noise);
  tensor_.set_data(nothing_);
  has_memory_ = false;
}

}  // namespace shardstep
