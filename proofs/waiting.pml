// How ranks wait for each other in shared memory: SharedCount and Bell (src/comm/shared/counters.h),
// SharedMemory::raise, wait_until and give_up (src/comm/shared/shared_memory.cpp).
//
// Each rank writes `data`, raises its count, and waits for the count of every other rank, ROUNDS
// times. In a CHAIN, a rank instead waits for the next one before it raises its own. Sleeping is FUTEX_WAIT: it compares and falls asleep in one step. FUTEX_WAKE wakes all that
// sleep on a bell.
//
// Abstracted: spinning before the first sleep; time, of which a wait knows only whether it has
// passed kPatience and the timeout; a rank's process and its one thread are the same. Memory is
// sequentially consistent: the code relies on release for the count and the ring and on acquire for
// both loads, and each reordering that weaker ones would allow is a mutation below.
//
// run: 2 ranks, the bell alone wakes | -DRANKS=2 -DNO_LOOK | safety
// run: 3 ranks, the bell alone wakes | -DRANKS=3 -DNO_LOOK | safety
// run: 2 ranks, the bell alone wakes, every wait ends | -DRANKS=2 -DNO_LOOK | ltl every_wait_ends
// run: 3 ranks, one dies anywhere | -DRANKS=3 -DROUNDS=1 -DDEATH | safety
// run: 2 ranks, one dies anywhere, every wait ends without a timeout | -DRANKS=2 -DDEATH | ltl every_wait_ends
// run: 3 ranks, one dies anywhere, every wait ends without a timeout | -DRANKS=3 -DROUNDS=1 -DDEATH | ltl every_wait_ends
// run: 3 ranks in a chain, one dies anywhere, every wait ends without a timeout | -DRANKS=3 -DCHAIN -DROUNDS=1 -DDEATH | ltl every_wait_ends
// run: 3 ranks, one gives up, every wait ends without a timeout | -DRANKS=3 -DROUNDS=1 -DGIVE_UP | ltl every_wait_ends
// run: 3 ranks, one stops for ever, every wait ends | -DRANKS=3 -DROUNDS=1 -DSTOP -DTIMEOUT | ltl every_wait_ends
// mutation: BELL_AFTER_COUNT | -DRANKS=2 -DNO_LOOK | safety | invalid end state
// mutation: RING_BEFORE_COUNT | -DRANKS=2 -DNO_LOOK | safety | invalid end state
// mutation: SLEEP_WITHOUT_COMPARING | -DRANKS=2 -DNO_LOOK | safety | invalid end state
// mutation: RING_WITHOUT_WAKE | -DRANKS=2 -DNO_LOOK | safety | invalid end state
// mutation: COUNT_BEFORE_DATA | -DRANKS=2 -DNO_LOOK | safety | data[other]>=target
// mutation: DEATH_WITHOUT_A_LOOK | -DRANKS=2 -DDEATH -DNO_LOOK | safety | invalid end state
// mutation: DEATH_UNCHECKED | -DRANKS=2 -DDEATH | ltl every_wait_ends | acceptance cycle
// mutation: ONLY_THE_AWAITED_CHECKED | -DRANKS=3 -DCHAIN -DROUNDS=1 -DDEATH | ltl every_wait_ends | acceptance cycle
// mutation: NO_LAST_CHECK | -DRANKS=2 -DDEATH | safety | lost!=other
// mutation: GIVING_UP_UNCHECKED | -DRANKS=2 -DGIVE_UP | ltl every_wait_ends | acceptance cycle
// mutation: FLAG_BEFORE_MESSAGE | -DRANKS=2 -DGIVE_UP | safety | message[i]
// mutation: TIMEOUT_UNCHECKED | -DRANKS=2 -DSTOP -DTIMEOUT | ltl every_wait_ends | acceptance cycle

#ifndef ROUNDS
#define ROUNDS 2
#endif

byte data[RANKS];    // what the count guards
byte count[RANKS];   // SharedCount
byte rings[RANKS];   // Bell: Rank::raised
byte asleep[RANKS];  // on which bell + 1, in the kernel
bit gave_up[RANKS];
bit message[RANKS];
bit gone[RANKS];     // what a pidfd tells
bit stopped[RANKS];
bit ended[RANKS];    // returned or thrown
byte failures = 0;   // of all kinds; at most one rank fails

#define reached(rank, target) (count[rank] >= target)

// A rank may die, stop or give up between any two steps; `one_may_fail` stands there.
inline one_may_fail() {
  skip;
#ifdef DEATH
  if
  :: atomic { failures == 0 -> failures = 1; asleep[me] = 0; gone[me] = 1; goto dead }
  :: skip
  fi
#endif
#ifdef STOP
  if
  :: atomic { failures == 0 -> failures = 1; asleep[me] = 0; stopped[me] = 1; goto dead }
  :: skip
  fi
#endif
}

inline wake(bell) {
  d_step {
    i = 0;
    do
    :: i < RANKS -> if :: asleep[i] == bell + 1 -> asleep[i] = 0 :: else fi; i++
    :: else -> break
    od
  }
}

inline ring(bell) {
  rings[bell]++;
  one_may_fail();
#ifndef RING_WITHOUT_WAKE
  wake(bell)
#endif
}

inline raise() {
#ifdef RING_BEFORE_COUNT
  ring(me);
  count[me]++;
#else
  count[me]++;
  one_may_fail();
  ring(me);
#endif
}

inline give_up() {
#ifdef FLAG_BEFORE_MESSAGE
  gave_up[me] = 1;
  message[me] = 1;
#else
  message[me] = 1;
  gave_up[me] = 1;
#endif
  other = 0;
  do
  :: other < RANKS -> ring(other); other++
  :: else -> break
  od
}

inline check_nobody_gave_up() {
  skip;
#ifndef GIVING_UP_UNCHECKED
  d_step {
    someone = RANKS;
    i = 0;
    do
    :: i < RANKS -> if :: gave_up[i] -> someone = i; assert(message[i]) :: else fi; i++
    :: else -> break
    od
  }
  if :: someone < RANKS -> goto thrown :: else fi
#endif
}

// `waited`: 0, 1 after kPatience, 2 after the timeout.
inline who_is_gone() {
  d_step {
    lost = RANKS;
    i = 0;
    do
#ifdef ONLY_THE_AWAITED_CHECKED
    :: i < RANKS -> if :: gone[i] && i == other -> lost = i :: else fi; i++
#else
    :: i < RANKS -> if :: gone[i] && (i == other || waited > 0) -> lost = i :: else fi; i++
#endif
    :: else -> break
    od
    if :: gone[other] -> lost = other :: else fi
  }
}

// Rank `other` has reached `target`, or this throws.
inline wait_until() {
  waited = 0;
  do
  ::
#ifdef BELL_AFTER_COUNT
    if :: reached(other, target) -> break :: else fi;
    heard = rings[other];
#else
    heard = rings[other];
    one_may_fail();
    if :: reached(other, target) -> break :: else fi;
#endif
    check_nobody_gave_up();
#ifndef DEATH_UNCHECKED
    who_is_gone();
    if
    :: lost < RANKS ->
#ifndef NO_LAST_CHECK
      if :: reached(other, target) -> break :: else fi;
#endif
      // Who has done its part and died is no loss.
      assert(lost != other || !reached(other, target));
      goto thrown
    :: else
    fi;
#endif
#if defined(TIMEOUT) && !defined(TIMEOUT_UNCHECKED)
    if :: waited == 2 -> give_up(); goto thrown :: else fi;
#endif
    one_may_fail();
    atomic {
      if
#ifdef SLEEP_WITHOUT_COMPARING
      :: asleep[me] = other + 1
#else
      :: rings[other] == heard -> asleep[me] = other + 1
      :: else
#endif
      fi
    }
    if
    :: asleep[me] == 0
#ifndef NO_LOOK
    // `look` has passed.
    :: atomic { asleep[me] != 0 -> asleep[me] = 0; if :: waited < 2 -> waited++ :: else fi }
#endif
    fi
  od;
  heard = 0; waited = 0; lost = 0
}

proctype Rank(byte me) {
  byte target = 1, other, heard, waited, lost, someone, i;
  do
  :: target <= ROUNDS ->
    one_may_fail();
#ifdef GIVE_UP
    if
    :: atomic { failures == 0 -> failures = 1 }; give_up(); goto thrown
    :: skip
    fi;
#endif
#ifdef CHAIN
    other = me + 1;
    if :: other < RANKS -> wait_until(); assert(data[other] >= target) :: else fi;
#endif
#ifdef COUNT_BEFORE_DATA
    raise();
    data[me] = target;
#else
    data[me] = target;
    raise();
#endif
#ifndef CHAIN
    other = 0;
    do
    :: other < RANKS ->
      if
      :: other != me -> wait_until(); assert(data[other] >= target)
      :: else
      fi;
      other++
    :: else -> break
    od;
#endif
    target++
  :: else -> break
  od;
  ended[me] = 1;
  goto dead;
thrown:
  // Nobody throws without a reason. A rank that has thrown is alive and does no more.
#ifndef TIMEOUT
  assert(failures > 0);
#endif
  ended[me] = 1;
dead:
  skip
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

#define is_over(r) (ended[r] || gone[r] || stopped[r])
#if RANKS == 2
#define all_over (is_over(0) && is_over(1))
#else
#define all_over (is_over(0) && is_over(1) && is_over(2))
#endif
ltl every_wait_ends { <> all_over }
