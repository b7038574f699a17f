// How a bucket's parts travel: BucketSegment (src/comm/shared/bucket_segment.cpp).
//
// Each rank publishes its part of a tag and, later, fetches everyone's, ROUNDS times. A slot holds
// the number of its round; whoever fetches asserts that it is the one it wants, and whoever
// publishes that everyone has fetched the last. A rank that waits for ever is an invalid end state.
//
// Abstracted: SharedMemory::wait, which returns when the count is reached (waiting.pml); the bytes.
// Memory is sequentially consistent, as counts are raised with release and read with acquire. Ranks
// fetch a round before they publish the next, as exchange.h requires; a rank that does not is the
// mutation PUBLISHES_TWICE.
//
// run: 2 ranks, 4 rounds | -DRANKS=2 -DROUNDS=4 | safety
// run: 3 ranks, 3 rounds | -DRANKS=3 -DROUNDS=3 | safety
// run: 3 ranks, 2 rounds, every round ends | -DRANKS=3 -DROUNDS=2 | ltl every_round_ends
// mutation: NO_WAIT_FOR_FETCHED | -DRANKS=2 -DROUNDS=2 | safety | assertion violated
// mutation: PUBLISHED_BEFORE_COPY | -DRANKS=2 -DROUNDS=2 | safety | slot[owner]==round
// mutation: FETCHED_BEFORE_COPY | -DRANKS=2 -DROUNDS=2 | safety | assertion violated
// mutation: FETCHED_AFTER_THE_FIRST | -DRANKS=3 -DROUNDS=2 | safety | assertion violated
// mutation: PUBLISHES_TWICE | -DRANKS=2 -DROUNDS=2 | safety | invalid end state

byte published[RANKS];  // Counts
byte fetched[RANKS];
byte slot[RANKS];
byte read_by[RANKS];  // a set of ranks
byte done_ranks = 0;

#define OTHERS (((1 << RANKS) - 1) & ~(1 << me))

inline copy_in() {
  atomic {
    assert(slot[me] == 0 || read_by[me] == OTHERS);
    slot[me] = round;
    read_by[me] = 0
  }
}

inline publish() {
#ifndef NO_WAIT_FOR_FETCHED
  other = 0;
  do
  :: other < RANKS ->
    if :: other != me -> (fetched[other] >= round - 1) :: else fi;
    other++
  :: else -> break
  od;
#endif
#ifdef PUBLISHED_BEFORE_COPY
  published[me]++;
  copy_in()
#else
  copy_in();
  published[me]++
#endif
}

inline fetch() {
#ifdef FETCHED_BEFORE_COPY
  fetched[me]++;
#endif
  distance = 1;
  do
  :: distance < RANKS ->
    owner = (me + distance) % RANKS;
    (published[owner] >= round);
    atomic {
      assert(slot[owner] == round);
      read_by[owner] = read_by[owner] | (1 << me)
    }
#ifdef FETCHED_AFTER_THE_FIRST
    if :: distance == 1 -> fetched[me]++ :: else fi;
#endif
    distance++
  :: else -> break
  od;
#if !defined(FETCHED_BEFORE_COPY) && !defined(FETCHED_AFTER_THE_FIRST)
  fetched[me]++
#else
  skip
#endif
}

proctype Rank(byte me) {
  byte round = 1, other, owner, distance;
  do
  :: round <= ROUNDS ->
    publish();
#ifdef PUBLISHES_TWICE
    round = 2;
    publish();
    round = 1;
    fetch();
    round = 2;
#endif
    fetch();
    round++
  :: else -> break
  od;
  done_ranks++
}

init {
  atomic {
    byte r = 0;
    do
    :: r < RANKS -> run Rank(r); r++
    :: else -> break
    od
  }
}

ltl every_round_ends { <> (done_ranks == RANKS) }
