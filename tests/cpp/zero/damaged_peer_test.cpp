// A rank whose memory is damaged writes nonsense where others read: they get errors, not crashes.
// Ranks are threads of a forked process, so that a crash is a failure here and not the end.

#include <gtest/gtest.h>
#include <sys/mman.h>

#include <barrier>
#include <fstream>
#include <map>
#include <random>
#include <sstream>
#include <thread>

#include "comm/agreement.h"
#include "comm/exchange.h"
#include "comm/make_exchange.h"
#include "comm/message_tag.h"
#include "comm/peer_input.h"
#include "comm/shared/notice_board.h"
#include "shard/gradient_lending.h"
#include "shard/shard_engine.h"
#include "shard/state_transfer.h"
#include "shardstep/shardstep.h"
#include "support/forked_ranks.h"
#include "support/full_run.h"
#include "support/test_support.h"
#include "support/torch.h"
#include "support/zero_support.h"

namespace shardstep {
namespace {

constexpr int kPeers = 3;
using std::chrono::milliseconds;
// Of groups in which nothing should wait for it: an error that comes `soon` does not.
milliseconds long_timeout() { return test::patience() * std::chrono::seconds(40); }
milliseconds soon() { return test::patience() * std::chrono::seconds(15); }
// Of groups in which ranks wait for what never comes.
milliseconds short_timeout() { return test::patience() * std::chrono::seconds(4); }

struct MappedSegment {
  char* begin = nullptr;
  size_t bytes = 0;
};

// One mapping of each segment of shared memory of this process.
std::vector<MappedSegment> mapped_segments() {
  std::ifstream maps("/proc/self/maps");
  std::map<std::string, MappedSegment> by_name;
  for (std::string line; std::getline(maps, line);) {
    const auto name = line.find("/memfd:shardstep");
    if (name == std::string::npos) continue;
    uintptr_t begin = 0, end = 0;
    char dash = 0;
    std::istringstream(line) >> std::hex >> begin >> dash >> end;
    by_name[line.substr(name)] = {reinterpret_cast<char*>(begin), end - begin};
  }
  std::vector<MappedSegment> segments;
  for (const auto& [name, segment] : by_name) segments.push_back(segment);
  return segments;
}

// What ranks share, as src/comm/shared lays it out; that the sizes are right is checked.
struct Counts {  // of BucketSegment and PieceRing, by rank
  detail::SharedCount published, fetched;
};
struct Note {
  int32_t tag;
  uint32_t slot;
};
struct Mailbox {  // of PieceSums, by source and owner
  detail::SharedQueue<Note, 32> notes;
  detail::SharedQueue<uint32_t, 32> slots_back;
};
struct alignas(64) Source {  // of PieceSums, by rank
  uint32_t activity;
};
struct Control {  // of SharedMemory
  struct {
    detail::Bell raised, mail;
    uint32_t gave_up;
    char message[1024];
  } ranks[kPeers];
  detail::NoticeBoard board;
};
struct SumsHeader {
  Source sources[kPeers];
  Mailbox boxes[kPeers][kPeers];
};
constexpr int64_t kPartNumel = 10000, kPieceBytes = 512 * 1024;
constexpr int64_t kPartBytes = kPartNumel * 4;

// The segment of so many bytes, after its mark; null if there is not exactly one.
char* segment_of(int64_t bytes) {
  constexpr int64_t kMark = 64, kPage = 4096;
  const auto mapped = (kMark + bytes + kPage - 1) / kPage * kPage;
  char* found = nullptr;
  int count = 0;
  for (const auto& segment : mapped_segments()) {
    if (static_cast<int64_t>(segment.bytes) != mapped) continue;
    found = segment.begin + kMark;
    ++count;
  }
  return count == 1 ? found : nullptr;
}
template <class Header>
Header& header_of(int64_t bytes) {
  auto* const header = segment_of(bytes);
  TORCH_CHECK(header, "expected one segment of ", bytes, " bytes");
  return *reinterpret_cast<Header*>(header);
}
Control& control() { return header_of<Control>(sizeof(Control)); }
Counts* bucket_counts() {
  return &header_of<Counts>(kPeers * (int64_t{sizeof(Counts)} + kPartBytes));
}
Counts* ring_counts() {
  return &header_of<Counts>(kPeers * (int64_t{sizeof(Counts)} + 4 * kPieceBytes));
}
SumsHeader& sums() {
  return header_of<SumsHeader>(int64_t{sizeof(SumsHeader)} + kPeers * 24 * kPieceBytes);
}

// A number that is no count, slot, tag or rank. One that could be is believed: what a slot holds
// has no checksum.
uint32_t nonsense(std::mt19937& random) {
  const std::vector<uint32_t> likely{1u << 20, 0x7fffffffu, 0x80000000u, ~0u};
  return random() % 2 == 0 ? likely[random() % likely.size()]
                           : static_cast<uint32_t>(random()) | 1u << 20;
}

// Overwrites words of counts, queues and notices, but no content.
void damage(std::mt19937& random, int words) {
  const std::vector<std::pair<char*, size_t>> headers{
      {reinterpret_cast<char*>(&control()), sizeof(Control)},
      {reinterpret_cast<char*>(ring_counts()), kPeers * sizeof(Counts)},
      {reinterpret_cast<char*>(&sums()), sizeof(SumsHeader)}};
  for (const auto& [begin, bytes] : headers) {
    for (int i = 0; i < words; ++i) {
      const uint32_t word = nonsense(random);
      std::memcpy(begin + random() % (bytes / 4) * 4, &word, sizeof(word));
    }
  }
}

// What each rank threw. Nobody waits in `in_step` for ranks that have thrown. Groups outlive all
// ranks, for which a closed connection would end what they wait for.
using Errors = std::vector<std::string>;
using InStep = std::barrier<>;
Errors errors_of_ranks(const std::function<void(const ProcessGroupPtr&, InStep&)>& body,
                       milliseconds timeout) {
  Errors errors(kPeers);
  InStep in_step(kPeers);
  std::vector<ProcessGroupPtr> groups(kPeers);
  test::run_ranks(
      kPeers,
      [&](const ProcessGroupPtr& group) {
        groups[group->getRank()] = group;
        try {
          body(group, in_step);
        } catch (const c10::Error& error) {
          errors[group->getRank()] = error.what_without_backtrace();
        } catch (const std::exception& error) {
          errors[group->getRank()] = error.what();
        }
        in_step.arrive_and_drop();
      },
      std::chrono::seconds(80), timeout);
  return errors;
}

// In a forked process that must not crash; `check` runs there.
void expect_no_crash(
    const std::string& what, milliseconds timeout,
    const std::function<void(const ProcessGroupPtr&, InStep&)>& body,
    const std::function<void(const Errors&)>& check = [](const Errors&) {}) {
  const auto pid = test::fork_process(
      [&] {
        const auto begin = std::chrono::steady_clock::now();
        const auto errors = errors_of_ranks(body, timeout);
        std::printf("%.160s\n", errors[0].c_str());
        EXPECT_LT(std::chrono::steady_clock::now() - begin, soon()) << what;
        check(errors);
      },
      90);
  EXPECT_EQ(test::status_of(pid), 0) << what;
}

void expect_in(const std::string& error, const std::string& expected) {
  EXPECT_NE(error.find(expected), std::string::npos) << expected << "\n" << error;
}

std::unique_ptr<ZeroRedundancyOptimizer> make_damaged(std::vector<at::Tensor>& params,
                                                      const ProcessGroupPtr& group,
                                                      ExchangeKind exchange) {
  params = test::make_params();
  return std::make_unique<ZeroRedundancyOptimizer>(params, torch::optim::AdamWOptions(0.01),
                                                   ZeroOptions()
                                                       .stage(2)
                                                       .process_group(group)
                                                       .sharding(Sharding::kElement)
                                                       .exchange(exchange)
                                                       .bucket_cap_mb(1e-4));
}

void damaged_step(std::vector<at::Tensor>& params, ZeroRedundancyOptimizer& zero) {
  at::Tensor loss = torch::zeros({});
  for (const auto& param : params) loss = loss + param.square().sum();
  loss.backward();
  zero.clip_grad_norm_(1.0);
  zero.step();
  zero.zero_grad();
}

// Each rank raises, or has what it would have without the damage.
TEST(DamagedPeer, NonsenseInSharedMemoryIsAnErrorAndNoCrash) {
  constexpr int kSteps = 21;
  for (int seed : test::sample(60, 1)) {
    std::vector<std::vector<at::Tensor>> whole(kPeers), damaged(kPeers);
    const auto train = [&](const ProcessGroupPtr& group, std::vector<at::Tensor>& params,
                           bool with_damage) {
      std::mt19937 random(static_cast<unsigned>(seed));
      auto zero = make_damaged(params, group, ExchangeKind::kSharedMemory);
      for (int step = 0; step < kSteps; ++step) {
        if (with_damage && step > 0 && group->getRank() == 1) damage(random, 1 + seed % 7);
        damaged_step(params, *zero);
      }
    };
    expect_no_crash(
        c10::str("seed ", seed), short_timeout(),
        [&](const ProcessGroupPtr& group, InStep&) {
          train(group, damaged[group->getRank()], true);
        },
        [&](const Errors& errors) {
          test::run_ranks(kPeers, [&](const ProcessGroupPtr& group) {
            train(group, whole[group->getRank()], false);
          });
          for (int rank = 0; rank < kPeers; ++rank) {
            if (!errors[rank].empty()) continue;
            test::expect_equal(damaged[rank], whole[rank], c10::str("seed ", seed, " rank ", rank));
          }
        });
  }
}

Parts some_parts() {
  Parts parts(kPeers);
  for (auto& part : parts) part = {torch::ones({kPartNumel})};
  return parts;
}

void gather_bucket(Exchange& exchange) {
  exchange.all_gather(some_parts(), MessageTag::bucket(1))->wait();
}
void gather_through_ring(Exchange& exchange) {
  const auto parts = some_parts();
  exchange.all_gather_and_wait({&parts});
}
void sum(Exchange& exchange) {
  exchange.reduce_scatter(some_parts(), MessageTag::bucket(1))->wait();
}

struct AimedDamage {
  std::string expected;  // in the error of rank 0
  void (*use)(Exchange&);
  void (*damage)();  // on rank 1
  milliseconds timeout = long_timeout();
};

// Rank 1 damages what it writes for the others after a round in which all was well.
TEST(DamagedPeer, NonsenseInACountOrQueueIsAnErrorThatNamesTheRank) {
  const auto kCount = "got a count that cannot be from rank 1";
  const auto kSlot = "got a note of a slot that cannot be from rank 1";
  const auto kSlotBack = "got a slot that it did not have from rank 1";
  const std::vector<AimedDamage> cases{
      {kCount, gather_bucket, [] { bucket_counts()[1].published.value += 1000; }},
      {kCount, gather_bucket, [] { bucket_counts()[1].fetched.value += 1000; }},
      {kCount, gather_through_ring, [] { ring_counts()[1].published.value += 1000; }},
      {kCount, gather_through_ring, [] { ring_counts()[1].fetched.value += 1000; }},
      {"expected the notes of rank 1 to be from 0 to 24, got", sum,
       [] { reinterpret_cast<detail::SharedCount&>(sums().boxes[1][0].notes).value += 1000; }},
      {"expected the slots that came back of rank 1 to be from 0 to 24, got", sum,
       [] { reinterpret_cast<detail::SharedCount&>(sums().boxes[0][1].slots_back).value += 1000; }},
      {"expected the tag of a note of rank 1 to be from 0 to 524287, got 524288", sum,
       [] { sums().boxes[1][0].notes.push({1 << MessageTag::kBits, 7}); }},
      {"expected the tag of a note of rank 1 to be from 0 to 524287, got -1", sum,
       [] { sums().boxes[1][0].notes.push({-1, 7}); }},
      {kSlot, sum, [] { sums().boxes[1][0].notes.push({1, 24}); }},
      {kSlot, sum,
       [] {
         sums().boxes[1][0].notes.push({3, 7});
         sums().boxes[1][0].notes.push({3, 7});
       }},
      {kSlotBack, sum, [] { sums().boxes[0][1].slots_back.push(24); }},
      {kSlotBack, sum, [] { sums().boxes[0][1].slots_back.push(7); }},
      // A count that is too low is no different from a rank that is slow.
      {"ms for the parts of rank 1", gather_bucket, [] { bucket_counts()[1].published.value -= 5; },
       short_timeout()},
      {"ms for the parameters of rank 1", gather_through_ring,
       [] { ring_counts()[1].published.value -= 5; }, short_timeout()},
  };
  for (const auto& [expected, use, damage, timeout] : cases) {
    expect_no_crash(
        expected, timeout,
        [&](const ProcessGroupPtr& group, InStep& in_step) {
          const auto exchange = make_exchange(group, {.kind = ExchangeKind::kSharedMemory});
          use(*exchange);
          in_step.arrive_and_wait();
          if (group->getRank() == 1) damage();
          in_step.arrive_and_wait();
          use(*exchange);
        },
        [&](const Errors& errors) { expect_in(errors[0], expected); });
  }
}

detail::Notice& notice_of_rank_1() {
  for (auto& notice : control().board.notices) {
    if (notice.key != 0 && notice.maker == 1) return notice;
  }
  TORCH_CHECK(false, "expected a notice of rank 1");
}

// Rank 1 makes a segment, which the others have yet to open.
TEST(DamagedPeer, NonsenseOnTheNoticeBoardIsAnErrorThatNamesTheRank) {
  struct Damage {
    const char* expected;
    void (*damage)();
    milliseconds timeout = long_timeout();
  };
  const auto kMissing = "has no longer, or never had, the shared memory that it offers";
  const std::vector<Damage> cases{
      {"expected the maker of shared memory, which some rank has written, to be from 0 to 2, got 9",
       [] { notice_of_rank_1().maker = 9; }},
      {"expected the error of shared memory of rank 1 to be from 0 to 4095, got 1048576",
       [] { notice_of_rank_1().error = 1 << 20; }},
      {"expected the ranks that have yet to open shared memory of rank 1 to be from 1 to 2, got 0",
       [] { notice_of_rank_1().to_come = 0; }},
      {"got an offer of another process's shared memory from rank 1",
       [] { notice_of_rank_1().offer.pid += 1; }},
      {"expected the descriptor of shared memory of rank 1 to be from 0 to 2147483647, got -5",
       [] { notice_of_rank_1().offer.descriptor = -5; }},
      {kMissing, [] { notice_of_rank_1().offer.descriptor = 0; }},
      {kMissing, [] { notice_of_rank_1().offer.mark ^= 1; }},
      {"expected the holder of the notice board, which some rank has written, to be from 0 to 3, "
       "got 77",
       [] { control().board.holder = 77; }},
      {"ms for a turn to share memory of rank 1", [] { control().board.holder = 1 + 1; },
       short_timeout()},
  };
  for (const auto& [expected, damage, timeout] : cases) {
    expect_no_crash(
        expected, timeout,
        [&](const ProcessGroupPtr& group, InStep& in_step) {
          const auto exchange = make_exchange(group, {.kind = ExchangeKind::kSharedMemory});
          in_step.arrive_and_wait();
          if (group->getRank() == 1) {
            // Publishes, and waits for nobody.
            const auto pending = exchange->all_gather(some_parts(), MessageTag::bucket(1));
            damage();
            in_step.arrive_and_wait();
            in_step.arrive_and_wait();
            return;
          }
          in_step.arrive_and_wait();
          gather_bucket(*exchange);
        },
        [&](const Errors& errors) {
          for (int rank : {0, 2}) expect_in(errors[rank], expected);
        });
  }
}

// What one rank cannot have ends the waits of those that wait for something else.
TEST(DamagedPeer, MemoryOfAnExchangeThatIsGoneEndsTheWaitsOfAll) {
  const auto gather = [](Exchange& exchange, int64_t bucket) {
    exchange.all_gather(some_parts(), MessageTag::bucket(bucket))->wait();
  };
  expect_no_crash(
      "gone", long_timeout(),
      [&](const ProcessGroupPtr& group, InStep& in_step) {
        auto exchange = make_exchange(group, {.kind = ExchangeKind::kSharedMemory});
        gather(*exchange, 2);
        if (group->getRank() == 1) {
          exchange->all_gather(some_parts(), MessageTag::bucket(1));
          exchange.reset();
        }
        in_step.arrive_and_wait();
        if (group->getRank() != 1) gather(*exchange, group->getRank() == 0 ? 1 : 2);
      },
      [](const Errors& errors) {
        expect_in(errors[0], "rank 1 (process ");
        expect_in(errors[0], "its optimizer may be gone");
        expect_in(errors[2], "rank 0 gave up: rank 1 (process ");
        expect_in(errors[2], "its optimizer may be gone");
      });
}

// Rank 1 stays away. Only rank 0 has a short timeout.
TEST(DamagedPeer, ATimeoutOfOneRankEndsTheWaitsOfOthers) {
  expect_no_crash(
      "a timeout", long_timeout(),
      [](const ProcessGroupPtr& group, InStep&) {
        if (group->getRank() == 0) {
          group->getBackend(at::kCPU)->getBackendOptions()->timeout = short_timeout();
        }
        const auto exchange = make_exchange(group, {.kind = ExchangeKind::kSharedMemory});
        if (group->getRank() != 1) gather_bucket(*exchange);
      },
      [](const Errors& errors) {
        expect_in(errors[0], c10::str("waited ", short_timeout().count(), " ms for the parts"));
        expect_in(errors[2], c10::str("rank 0 gave up: waited ", short_timeout().count(), " ms"));
      });
}

// A catalogue as src/shard/state_transfer.cpp lays it out: numbers, and strings after their size.
class CatalogueText {
 public:
  CatalogueText& number(int64_t number) {
    bytes_.append(reinterpret_cast<const char*>(&number), sizeof(number));
    return *this;
  }
  CatalogueText& string(const std::string& text) {
    number(static_cast<int64_t>(text.size()));
    bytes_ += text;
    return *this;
  }
  const std::string& bytes() const { return bytes_; }

 private:
  std::string bytes_;
};

// What rank 1 sends where the others gather the state on rank 0: a size of its own choice, if it
// does not say that of the text.
struct SentCatalogue {
  std::string text;
  std::optional<int64_t> size;
};

void gather_state_with(const SentCatalogue& sent, const ShardEngine& engine) {
  if (engine.rank() != 1) {
    gather_state(engine, {}, 0);
    return;
  }
  const auto& group = engine.control_group();
  detail::all_gather_number(group, 0);  // where to
  const auto size = sent.size.value_or(static_cast<int64_t>(sent.text.size()));
  engine.control()
      .gather({at::full({1}, size, at::kLong)}, Parts(kPeers), 0, ControlMessage::kStateSizes)
      ->wait();
  detail::tell_every_rank(group, nullptr);
  auto text = at::empty({static_cast<int64_t>(sent.text.size())}, at::kByte);
  std::copy(sent.text.begin(), sent.text.end(), text.mutable_data_ptr<uint8_t>());
  engine.control().gather({text}, Parts(kPeers), 0, ControlMessage::kStateCatalogues)->wait();
  detail::tell_every_rank(group, nullptr);
}

void expect_catalogue_is_refused(const std::string& what, const SentCatalogue& sent,
                                 const std::string& expected) {
  expect_no_crash(
      what, long_timeout(),
      [&](const ProcessGroupPtr& group, InStep&) {
        std::vector<at::Tensor> params;
        auto zero = make_damaged(params, group, ExchangeKind::kPairwise);
        damaged_step(params, *zero);
        gather_state_with(sent, zero->engine());
      },
      [&](const Errors& errors) {
        expect_in(errors[0], expected);
        expect_in(errors[0], "catalogue of state");
        expect_in(errors[0], "rank 1");
        for (int rank : {1, 2}) {
          expect_in(errors[rank], "rank 0 failed with: ");
          expect_in(errors[rank], expected);
        }
      });
}

// The slices that rank 1 has in make_damaged().
int64_t slices_of_rank_1() {
  static const int64_t slices = [] {
    int made[2] = {};
    TORCH_CHECK(::pipe(made) == 0);
    const auto pid = test::fork_process([&] {
      test::run_ranks(kPeers, [&](const ProcessGroupPtr& group) {
        std::vector<at::Tensor> params;
        const auto zero = make_damaged(params, group, ExchangeKind::kPairwise);
        const int64_t count = zero->engine().partition().owned(1).size();
        if (group->getRank() == 1) TORCH_CHECK(::write(made[1], &count, sizeof(count)) > 0);
        group->barrier()->wait();
      });
    });
    int64_t count = 0;
    TORCH_CHECK(test::status_of(pid) == 0 && ::read(made[0], &count, sizeof(count)) > 0);
    return count;
  }();
  return slices;
}

TEST(DamagedPeer, NonsenseInACatalogueOfStateIsAnErrorThatNamesTheRank) {
  const int64_t slices = slices_of_rank_1();
  const int64_t tensor = static_cast<int64_t>(at::kFloat);
  enum Form { kBytes, kInline, kWhole, kCut, kNone };
  // One slice with so many entries, of which the first begins.
  const auto begin = [&](int64_t entries) {
    return CatalogueText().number(slices).number(1).number(entries);
  };
  const auto entry = [&](int64_t form, int64_t dtype, const std::vector<int64_t>& sizes) {
    auto text = begin(1).string("exp_avg").number(form).string("").number(dtype);
    text.number(static_cast<int64_t>(sizes.size()));
    for (int64_t size : sizes) text.number(size);
    for (int64_t slice = 1; slice < slices; ++slice) text.number(0).number(0);
    return text.bytes();
  };
  struct Nonsense {
    SentCatalogue sent;
    std::string expected;
  };
  const auto huge = int64_t{1} << 40;
  const auto of_dtype = [&](at::ScalarType dtype) {
    return SentCatalogue{entry(kCut, static_cast<int64_t>(dtype), {4})};
  };
  const std::string early = "that ends early";
  std::vector<Nonsense> cases{
      {{"", -1}, "expected the size of a catalogue of state of rank 1 to be from 0 to"},
      {{"", INT64_MAX}, "expected the size of a catalogue of state of rank 1 to be from 0 to"},
      {{""}, early},
      {{"four"}, early},
      {{CatalogueText().number(slices + 1).bytes()}, "expected the slices in a catalogue of state"},
      {{CatalogueText().number(-1).bytes()}, "expected the slices in a catalogue of state"},
      {{CatalogueText().number(slices).bytes()}, early},
      {{CatalogueText().number(slices).number(2).bytes()}, "expected whether a slice has state"},
      {{begin(INT64_MIN).bytes()}, "expected a count in a catalogue of state"},
      {{begin(huge).bytes()}, "expected a count in a catalogue of state"},
      {{begin(1).bytes()}, "expected a count in a catalogue of state"},
      {{begin(1).number(huge).number(0).number(0).number(0).number(0).bytes()},
       "expected a count in a catalogue of state"},
      {{entry(kNone, tensor, {})}, "expected a form in a catalogue of state"},
      {{entry(-1, tensor, {})}, "expected a form in a catalogue of state"},
      {{entry(kWhole, -1, {4})}, "expected a dtype in a catalogue of state"},
      {{entry(kWhole, 1000, {4})}, "expected a dtype in a catalogue of state"},
      {of_dtype(at::ScalarType::Undefined), "a dtype that state cannot have"},
      {of_dtype(at::kQInt8), "a dtype that state cannot have"},
      {of_dtype(at::kQUInt2x4), "a dtype that state cannot have"},
      {{entry(kWhole, tensor, {-4})}, "expected a size in a catalogue of state"},
      {{entry(kWhole, tensor, {INT64_MAX})}, "expected a size in a catalogue of state"},
      {{entry(kWhole, tensor, {huge, huge})}, "expected the elements of state in a catalogue"},
      {{entry(kWhole, tensor, {0, huge, huge})}, "expected the elements of state in a catalogue"},
      {{entry(kWhole, tensor, {huge * 256})}, "no room for the state of rank 1"},
      {{entry(kInline, tensor, {huge})}, "of another size than it says"},
      {{entry(kInline, tensor, {4})}, "of another size than it says"},
      {{entry(kCut, tensor, {4}) + "more"}, "that goes on after its end"},
  };
  for (size_t i = 0; i < cases.size(); ++i) {
    expect_catalogue_is_refused(c10::str("case ", i), cases[i].sent, cases[i].expected);
  }
}

TEST(DamagedPeer, NonsenseInACatalogueOfStateIsAnErrorAndNoCrash) {
  for (int seed : test::sample(200, 2)) {
    std::mt19937 random(static_cast<unsigned>(seed));
    const int64_t bytes = random() % 3 == 0 ? random() % 4096 : 8 * (1 + random() % 64);
    std::string text(bytes, '\0');
    for (auto& byte : text) byte = static_cast<char>(random());
    // Small numbers come further.
    for (int64_t i = 0; i + 8 <= bytes; i += 8) {
      int64_t number = random() % 4 == 0 ? static_cast<int32_t>(random()) : random() % 9;
      if (i == 0 && random() % 4 != 0) number = slices_of_rank_1();
      std::memcpy(text.data() + i, &number, sizeof(number));
    }
    expect_catalogue_is_refused(c10::str("seed ", seed), {text}, "");
  }
}

// Takes the part of rank 1 in a collective that the others reach in the library.
at::Tensor all_gather_by_hand(Exchange& exchange, const at::Tensor& own, ControlMessage message) {
  auto all = at::zeros({kPeers, own.numel()}, at::kByte);
  all[1].copy_(own);
  Parts parts;
  for (const auto& row : all.unbind()) parts.push_back({row});
  exchange.all_gather(parts, message)->wait();
  return all;
}

// What the message of a meeting over gradients holds where (ShardedGradients::Message).
TEST(DamagedPeer, NonsenseInAMeetingOverGradientsIsAnErrorThatNamesTheRank) {
  struct Field {
    size_t offset;
    int64_t number;
    const char* expected;
  };
  constexpr size_t kMessage = 96, kPosts = 16;
  const std::vector<Field> fields{
      {8, -1, "expected the backward passes of rank 1 to be from 0 to"},
      {16, 1 << 20, "expected the forgotten backward passes of rank 1 to be from 0 to"},
      {48, 99, "expected the kind of a question of rank 1 to be from 0 to"},
      {56, -7, "expected the subject of a question of rank 1 to be from 0 to"},
      {80, -2, "expected the changes to the gradients of rank 1 to be from -1 to"},
      {88, 1000, "expected the replaced gradient of rank 1 to be from -1 to"},
      {kMessage, -1, "expected the posts of a bucket of rank 1 to be from 0 to"},
      {kMessage + 8, 1 << 20, "expected the forgotten posts of a bucket of rank 1 to be from 0 to"},
  };
  at::Tensor honest;  // what rank 0 sends in a rehearsal
  const auto meet = [&](const ProcessGroupPtr& group, const Field* field) {
    std::vector<at::Tensor> params;
    auto zero = make_damaged(params, group, ExchangeKind::kPairwise);
    damaged_step(params, *zero);
    if (group->getRank() != 1) {
      zero->clip_grad_norm_(1.0);
      return;
    }
    const auto buckets = zero->engine().partition().buckets().size();
    auto own = honest.defined()
                   ? honest.clone()
                   : at::zeros({static_cast<int64_t>(kMessage + kPosts * buckets + params.size())},
                               at::kByte);
    if (field) {
      std::memcpy(own.mutable_data_ptr<uint8_t>() + field->offset, &field->number,
                  sizeof(field->number));
    }
    const auto all =
        all_gather_by_hand(zero->engine().control(), own, ControlMessage::kGradientMeeting);
    if (!field) honest = all[0].clone();
  };
  const auto pid = test::fork_process(
      [&] {
        const auto run = [&](const Field* field) {
          // In the rehearsal the others wait for what rank 1 does not send.
          return errors_of_ranks([&](const auto& group, InStep&) { meet(group, field); },
                                 field ? long_timeout() : short_timeout());
        };
        run(nullptr);
        ASSERT_TRUE(honest.defined());
        for (const auto& field : fields) {
          const auto errors = run(&field);
          for (int rank : {0, 2}) expect_in(errors[rank], field.expected);
        }
      },
      90);
  EXPECT_EQ(test::status_of(pid), 0);
}

// Stage 1, in which nothing has been summed.
std::unique_ptr<ZeroRedundancyOptimizer> make_lender(const std::vector<at::Tensor>& params,
                                                     const ProcessGroupPtr& group) {
  return std::make_unique<ZeroRedundancyOptimizer>(params, torch::optim::AdamWOptions(0.01),
                                                   ZeroOptions()
                                                       .stage(1)
                                                       .process_group(group)
                                                       .sharding(Sharding::kElement)
                                                       .exchange(ExchangeKind::kPairwise));
}

// Rank 1, the only one with gradients, tells rank 0 with nonsense which ones it lends.
TEST(DamagedPeer, NonsenseInFlagsOfLentGradientsIsAnErrorThatNamesTheRank) {
  const std::string expected =
      "expected whether a gradient is lent of rank 1 to be from 0 to 1, got 77";
  expect_no_crash(
      "flags", long_timeout(),
      [](const ProcessGroupPtr& group, InStep&) {
        const auto zero = make_lender(test::make_params(), group);
        auto& engine = const_cast<ShardEngine&>(zero->engine());
        if (group->getRank() != 1) {
          lend_gradients(engine, false);
          return;
        }
        detail::all_gather_number(engine.control_group(), 1);
        for (int borrower : {0, 2}) {
          const auto flags = at::full({engine.param_count()}, borrower == 0 ? 77 : 0, at::kByte);
          engine.control().transfer({flags}, 1, borrower, ControlMessage::kLentGradients)->wait();
        }
        detail::tell_every_rank(engine.control_group(), nullptr);
      },
      [&](const Errors& errors) {
        expect_in(errors[0], expected);
        for (int rank : {1, 2})
          expect_in(errors[rank], "rank 0 failed with: shardstep: " + expected);
      });
}

// Of the lender, or of a rank that borrows.
TEST(DamagedPeer, AGradientThatCannotBeLentIsAnErrorOnEveryRank) {
  for (int sparse : {0, 1}) {
    const std::string expected = "expected dense gradients with Join, got Sparse";
    expect_no_crash(
        c10::str("sparse on rank ", sparse), long_timeout(),
        [&](const ProcessGroupPtr& group, InStep&) {
          const std::vector<at::Tensor> params{torch::ones({6, 2}, torch::requires_grad())};
          const auto zero = make_lender(params, group);
          if (group->getRank() == 1) params[0].mutable_grad() = torch::ones({6, 2});
          if (group->getRank() == sparse) {
            params[0].mutable_grad() = torch::ones({6, 2}).to_sparse();
          }
          lend_gradients(const_cast<ShardEngine&>(zero->engine()), group->getRank() == 1);
        },
        [&](const Errors& errors) {
          for (int rank = 0; rank < kPeers; ++rank) {
            if (rank != sparse)
              expect_in(errors[rank], c10::str("rank ", sparse, " failed with: "));
            expect_in(errors[rank], expected);
          }
        });
  }
}

TEST(DamagedPeer, ANumberOutOfBoundsIsNamed) {
  const auto pid = test::fork_process([] {
    const auto group = test::alone();
    const detail::PeerInput peer(group, 7);
    EXPECT_EQ(peer.check("the slot", 3, 0, 3), 3);
    for (int64_t number : {int64_t{-1}, int64_t{4}, INT64_MIN, INT64_MAX}) {
      const auto message =
          test::error_of<c10::Error>([&] { peer.check("the slot", number, 0, 3); });
      EXPECT_NE(
          message.find(c10::str("expected the slot of rank 7 to be from 0 to 3, got ", number)),
          std::string::npos)
          << message;
      EXPECT_NE(message.find("(rank 0 of 1)"), std::string::npos) << message;
    }
  });
  EXPECT_EQ(test::status_of(pid), 0);
}

}  // namespace
}  // namespace shardstep
