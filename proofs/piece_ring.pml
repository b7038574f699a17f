// How parameters travel in slots that are used over and over: PieceRing
// (src/comm/shared/piece_ring.cpp).
//
// Each rank publishes its pieces and fetches everyone's, in CALLS calls of all_gather with PIECES
// pieces each. A slot holds the number of its piece; whoever fetches asserts that it is the one it
// wants, and whoever publishes that everyone has fetched what it overwrites. A rank that waits for
// ever is an invalid end state.
//
// Abstracted: SharedMemory::wait, which returns when the count is reached (waiting.pml); the bytes.
// Counts wrap around at 16 instead of 2^32, and start just before they do. Memory is sequentially
// consistent, as counts are raised with release and read with acquire.
//
// run: 2 ranks, the code's slots | -DRANKS=2 -DkSlots=4 -DkAhead=2 -DPIECES=5 -DCALLS=2 | safety
// run: 3 ranks, the code's slots | -DRANKS=3 -DkSlots=4 -DkAhead=2 -DPIECES=5 -DCALLS=1 | safety
// run: 3 ranks, the code's slots, short calls | -DRANKS=3 -DkSlots=4 -DkAhead=2 -DPIECES=1 -DCALLS=4 | safety
// run: 3 ranks, the code's slots, every call ends | -DRANKS=3 -DkSlots=4 -DkAhead=2 -DPIECES=3 -DCALLS=1 | ltl every_call_ends
// mutation: EARLY_BY_ONE | -DRANKS=2 -DkSlots=4 -DkAhead=3 -DPIECES=5 -DCALLS=2 | safety | overwritten
// mutation: NO_WAIT_FOR_FETCHED | -DRANKS=2 -DkSlots=4 -DkAhead=2 -DPIECES=3 -DCALLS=2 | safety | assertion violated
// mutation: PUBLISHED_BEFORE_COPY | -DRANKS=2 -DkSlots=4 -DkAhead=2 -DPIECES=3 -DCALLS=2 | safety | here==wanted
// mutation: FETCHED_BEFORE_COPY | -DRANKS=2 -DkSlots=2 -DkAhead=1 -DPIECES=5 -DCALLS=2 | safety | assertion violated
// mutation: AS_FAR_AHEAD_AS_SLOTS | -DRANKS=2 -DkSlots=4 -DkAhead=4 -DPIECES=6 -DCALLS=1 | safety | invalid end state
// mutation: COMPARED_WITHOUT_WRAPPING | -DRANKS=2 -DkSlots=4 -DkAhead=2 -DPIECES=5 -DCALLS=1 | safety | invalid end state

#define WRAP 16
#define FIRST 13

byte published[RANKS] = FIRST;  // Counts
byte fetched[RANKS] = FIRST;
byte content[RANKS * kSlots] = 255;
byte read_by[RANKS * kSlots] = 0;  // a set of ranks
byte done_ranks = 0;

#define SLOT(owner, piece) ((owner) * kSlots + (piece) % kSlots)
#define ALL ((1 << RANKS) - 1)
#ifdef COMPARED_WITHOUT_WRAPPING
#define reached(count, target) ((count) >= ((target) + WRAP) % WRAP)
#else
#define reached(count, target) (((count) - (target) + 2 * WRAP) % WRAP < WRAP / 2)
#endif

inline copy_in() {
  atomic {
    bool overwritten = content[SLOT(me, mine)] != 255 && read_by[SLOT(me, mine)] != (ALL & ~(1 << me));
    assert(!overwritten);
    content[SLOT(me, mine)] = mine;
    read_by[SLOT(me, mine)] = 0
  }
}

inline publish() {
#ifndef NO_WAIT_FOR_FETCHED
  other = 0;
  do
  :: other < RANKS ->
#ifdef EARLY_BY_ONE
    if :: other != me -> (reached(fetched[other], mine - kSlots)) :: else fi;
#else
    if :: other != me -> (reached(fetched[other], mine + 1 - kSlots)) :: else fi;
#endif
    other++
  :: else -> break
  od;
#endif
#ifdef PUBLISHED_BEFORE_COPY
  published[me] = (published[me] + 1) % WRAP;
  copy_in();
#else
  copy_in();
  published[me] = (published[me] + 1) % WRAP;
#endif
  mine = (mine + 1) % WRAP
}

inline copy_out() {
  atomic {
    here = content[SLOT(owner, wanted)];
    assert(here == wanted);
    read_by[SLOT(owner, wanted)] = read_by[SLOT(owner, wanted)] | (1 << me);
    here = 0
  }
}

inline fetch() {
  distance = 1;
#ifdef FETCHED_BEFORE_COPY
  fetched[me] = (fetched[me] + 1) % WRAP;
#endif
  do
  :: distance < RANKS ->
    owner = (me + distance) % RANKS;
    (reached(published[owner], wanted + 1));
    copy_out();
    distance++
  :: else -> break
  od;
#ifndef FETCHED_BEFORE_COPY
  fetched[me] = (fetched[me] + 1) % WRAP;
#endif
  wanted = (wanted + 1) % WRAP
}

proctype Rank(byte me) {
  byte calls = 0, mine = FIRST, wanted = FIRST, end, other, owner, distance, here;
  do
  :: calls < CALLS ->
    end = (wanted + PIECES) % WRAP;
    do
    :: wanted != end ->
      do
      :: mine != end && (mine - wanted + WRAP) % WRAP <= kAhead -> publish()
      :: else -> break
      od;
      fetch()
    :: else -> break
    od;
    calls++
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

ltl every_call_ends { <> (done_ranks == RANKS) }
