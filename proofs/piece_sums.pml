// How sums travel in few slots: PieceSums (src/comm/shared/piece_sums.cpp).
//
// Each rank starts a sum for each tag, in an order of its own, and then finishes them in an order of
// its own; ROUNDS times. A sum has PIECES pieces per owner. A slot holds which piece was copied into
// it, and whoever reads it asserts that it is the one that the note announced. A rank that waits for
// ever is an invalid end state; there are no cycles, so every schedule comes to an end.
//
// ELSEWHERE: rank 0 starts its sums, and finishes none before all others have left, as in a collective
// that is not ours; its attendant (AttendedSums, attended_sums.h) looks and makes room meanwhile.
//
// Abstracted: a bell is whether it has rung since its rank looked (waiting.pml has the counts); a
// SharedQueue is a channel, whose overflow is asserted against; time: move_out comes whenever it has
// something to do while finish() waits, as it does in the code after kPatience or kLongPatience;
// numbers, sizes of pieces, and slots that could not be reserved (fewer of them is another run).
// Memory is sequentially consistent: the queues raise with release and pop with acquire, and copies
// past the caches end in a fence.
//
// run: 2 ranks, 2 tags, 1 slot | -DRANKS=2 -DTAGS=2 -DPIECES=1 -DSLOTS=1 | safety
// run: 3 ranks, 1 tag, 1 slot | -DRANKS=3 -DTAGS=1 -DPIECES=1 -DSLOTS=1 | safety
// run: 2 ranks, 2 tags, 1 slot, every sum ends | -DRANKS=2 -DTAGS=2 -DPIECES=1 -DSLOTS=1 | ltl every_sum_ends
// run: 2 ranks, 2 tags of 3 pieces, 2 slots, 2 rounds, coarse | -DRANKS=2 -DTAGS=2 -DPIECES=3 -DSLOTS=2 -DROUNDS=2 -DCOARSE | safety
// run: 3 ranks, 2 tags, 1 slot, coarse | -DRANKS=3 -DTAGS=2 -DPIECES=1 -DSLOTS=1 -DCOARSE | safety
// run: 3 ranks, 1 tag of 2 pieces, 1 slot, coarse | -DRANKS=3 -DTAGS=1 -DPIECES=2 -DSLOTS=1 -DCOARSE | safety
// run: 2 ranks, 2 tags, 1 slot, one elsewhere | -DRANKS=2 -DTAGS=2 -DPIECES=1 -DSLOTS=1 -DELSEWHERE | safety
// run: 3 ranks, 2 tags, 1 slot, one elsewhere, coarse | -DRANKS=3 -DTAGS=2 -DPIECES=1 -DSLOTS=1 -DCOARSE -DELSEWHERE | safety
// run: 3 ranks, 1 tag, 1 slot, 2 rounds, coarse | -DRANKS=3 -DTAGS=1 -DPIECES=1 -DSLOTS=1 -DROUNDS=2 -DCOARSE | safety
// mutation: NOTE_BEFORE_COPY | -DRANKS=2 -DTAGS=2 -DPIECES=1 -DSLOTS=1 | safety | what==
// mutation: EARLY_RELEASE | -DRANKS=2 -DTAGS=2 -DPIECES=1 -DSLOTS=1 | safety | what==
// mutation: MOVED_AFTER_RELEASE | -DRANKS=3 -DTAGS=2 -DPIECES=1 -DSLOTS=1 -DCOARSE | safety | what==
// mutation: SLOT_RETURNED_TWICE | -DRANKS=3 -DTAGS=2 -DPIECES=1 -DSLOTS=1 -DCOARSE | safety | assertion violated
// mutation: NO_MOVE_OUT | -DRANKS=3 -DTAGS=2 -DPIECES=1 -DSLOTS=1 -DCOARSE | safety | invalid end state
// mutation: NOBODY_SAYS_THAT_IT_NEEDS_SLOTS | -DRANKS=3 -DTAGS=2 -DPIECES=1 -DSLOTS=1 -DCOARSE | safety | invalid end state
// mutation: RING_BEFORE_NOTE | -DRANKS=2 -DTAGS=2 -DPIECES=1 -DSLOTS=1 | safety | invalid end state
// mutation: RING_BEFORE_SLOT_BACK | -DRANKS=2 -DTAGS=2 -DPIECES=1 -DSLOTS=1 | safety | invalid end state
// mutation: NO_RING_FOR_A_SLOT | -DRANKS=2 -DTAGS=2 -DPIECES=1 -DSLOTS=1 | safety | invalid end state
// mutation: HEARD_AFTER_NOTES | -DRANKS=2 -DTAGS=2 -DPIECES=1 -DSLOTS=1 | safety | invalid end state
// mutation: START_WITHOUT_ADDING_UP | -DRANKS=2 -DTAGS=2 -DPIECES=1 -DSLOTS=1 | safety | invalid end state
// mutation: LOOK_WITHOUT_POSTING | -DRANKS=2 -DTAGS=2 -DPIECES=1 -DSLOTS=1 | safety | invalid end state
// mutation: NO_ATTENDANT | -DRANKS=2 -DTAGS=2 -DPIECES=1 -DSLOTS=1 -DELSEWHERE | safety | invalid end state
// mutation: ATTENDANT_ONLY_LOOKS | -DRANKS=3 -DTAGS=2 -DPIECES=1 -DSLOTS=1 -DCOARSE -DELSEWHERE | safety | invalid end state
// mutation: QUEUE_SHORTER_THAN_SLOTS | -DRANKS=2 -DTAGS=2 -DPIECES=2 -DSLOTS=2 -DQUEUE=1 | safety | len(

#ifndef ROUNDS
#define ROUNDS 1
#endif
#ifndef QUEUE
#define QUEUE SLOTS
#endif
// COARSE: what a rank does between two waits, but move_out, is one step, so that more ranks, pieces and rounds can
// be tried: that shows the order of things, and the fine runs the races.
#ifdef COARSE
#define BEGIN_STEP atomic {
#define END_STEP skip }
#else
#define BEGIN_STEP
#define END_STEP skip
#endif
#define PAIR(a, b) ((a) * RANKS + (b))

// In shared memory. A note is (tag, slot); the round and piece stand for what the slot holds.
chan notes[RANKS * RANKS] = [QUEUE] of { byte, byte };       // Mailbox::notes, by PAIR(source, owner)
chan slots_back[RANKS * RANKS] = [QUEUE] of { byte };        // Mailbox::slots_back
byte content[RANKS * SLOTS];                                 // of slots, by source
bit rung[RANKS];                                             // mail_bell
mtype = { kComputes, kWaits, kWaitsForSlots };
mtype activity[RANKS] = kComputes;

// What one rank knows, local to its process.
#define DEPTH (PIECES * ROUNDS)
#define SEEN_FROM(tag, rank) ((tag) * RANKS + (rank))
typedef Piece {
  byte slot;
  bit moved;
  byte what;  // was moved
}
typedef Arrived {
  Piece pieces[DEPTH];
  byte size;
}
typedef Own {
  bit free[SLOTS];               // free_
  byte posting[TAGS];            // posting_, in order
  byte n_posting;
  bit started[TAGS];             // and not finished
  bit adding[TAGS];              // adding_
  bit posted[TAGS];              // PieceSum::posted_
  byte to_sum[TAGS];             // PieceSum::to_sum_
  byte to_post[TAGS * RANKS];    // PieceSum::outgoing_, by tag and owner
  byte next_out[TAGS * RANKS];   // the number of the next piece to post: 1, 2, ...
  byte next_in[TAGS * RANKS];    // and of the next one to sum, by source
  Arrived arrived[TAGS * RANKS]; // arrived_, by SEEN_FROM(tag, source)
  byte unmoved[RANKS];           // pieces that have arrived and are in a slot, by source
}
byte done_ranks = 0;

// What a slot with this piece holds: never 0.
#define WHAT(tag, to, number) (((tag) * RANKS + (to)) * DEPTH + (number))

#define ARRIVED own.arrived[SEEN_FROM(tag, other)]

inline ring(rank) { rung[rank] = 1 }

// A slot in `slot`, or SLOTS if there is none. In a d_step.
inline free_slot() {
  owner = 0;
  do
  :: owner < RANKS ->
    do
    :: len(slots_back[PAIR(me, owner)]) > 0 ->
      slots_back[PAIR(me, owner)]?slot;
      assert(!own.free[slot]);
      own.free[slot] = 1
    :: else -> break
    od;
    owner++
  :: else -> break
  od;
  owner = 0;
  slot = 0;
  do
  :: slot < SLOTS && !own.free[slot] -> slot++
  :: else -> break
  od;
  if :: slot < SLOTS -> own.free[slot] = 0 :: else fi
}

// The next piece of the first sum in posting_: its tag, owner and slot; RANKS in `to` if all are
// posted or there is no slot. In turns, as post_what_fits does.
inline next_to_post() {
  d_step {
    to = RANKS;
    do
    :: own.n_posting == 0 -> break
    :: else ->
      tag = own.posting[0];
      i = 1;
      do
      :: i < RANKS && own.to_post[SEEN_FROM(tag, (me + distance) % RANKS)] == 0 ->
        distance = distance % (RANKS - 1) + 1;
        i++
      :: else -> break
      od;
      if
      :: i < RANKS ->
        free_slot();
        if :: slot < SLOTS -> to = (me + distance) % RANKS :: else fi;
        distance = distance % (RANKS - 1) + 1;
        break
      :: else ->
        own.posted[tag] = 1;
        own.n_posting--;
        i = 0;
        do
        :: i < own.n_posting -> own.posting[i] = own.posting[i + 1]; i++
        :: else -> break
        od;
        own.posting[own.n_posting] = 0;
        distance = 1
      fi
    od;
    i = 0;
    if :: to == RANKS -> tag = 0; slot = 0; distance = 1 :: else fi
  }
}

inline copy_piece() {
  content[me * SLOTS + slot] = WHAT(tag, to, own.next_out[SEEN_FROM(tag, to)])
}

inline push_note() {
  atomic { assert(len(notes[PAIR(me, to)]) < QUEUE); notes[PAIR(me, to)]!tag, slot }
}

inline post_what_fits() {
  do
  ::
    next_to_post();
    if
    :: to == RANKS -> break
    :: else ->
#ifdef NOTE_BEFORE_COPY
      push_note();
      copy_piece();
      ring(to);
#elif defined(RING_BEFORE_NOTE)
      copy_piece();
      ring(to);
      push_note();
#else
      copy_piece();
      push_note();
      ring(to);
#endif
      d_step { own.next_out[SEEN_FROM(tag, to)]++; own.to_post[SEEN_FROM(tag, to)]-- }
    fi
  od
}

inline return_slot(from) {
#ifdef RING_BEFORE_SLOT_BACK
  ring(from);
#endif
  atomic { assert(len(slots_back[PAIR(from, me)]) < QUEUE); slots_back[PAIR(from, me)]!slot };
#if !defined(RING_BEFORE_SLOT_BACK) && !defined(NO_RING_FOR_A_SLOT)
  ring(from)
#else
  skip
#endif
}

// In a d_step.
inline read_front() {
  if
  :: ARRIVED.pieces[0].moved -> what = ARRIVED.pieces[0].what
  :: else -> what = content[other * SLOTS + ARRIVED.pieces[0].slot]
  fi;
  assert(what == WHAT(tag, me, own.next_in[SEEN_FROM(tag, other)]));
  own.next_in[SEEN_FROM(tag, other)]++;
  what = 0
}

// In a d_step.
inline pop_front() {
  slot = ARRIVED.pieces[0].slot;
  moved = ARRIVED.pieces[0].moved;
  if :: !moved -> own.unmoved[other]-- :: else fi;
  i = 1;
  do
  :: i < ARRIVED.size ->
    ARRIVED.pieces[i - 1].slot = ARRIVED.pieces[i].slot;
    ARRIVED.pieces[i - 1].moved = ARRIVED.pieces[i].moved;
    ARRIVED.pieces[i - 1].what = ARRIVED.pieces[i].what;
    i++
  :: else -> break
  od;
  ARRIVED.size--;
  ARRIVED.pieces[ARRIVED.size].slot = 0;
  ARRIVED.pieces[ARRIVED.size].moved = 0;
  ARRIVED.pieces[ARRIVED.size].what = 0;
  i = 0
}

// Sums the next piece of `tag` if every rank's has arrived, and says so in `complete`.
inline sum_piece() {
  d_step {
    complete = own.to_sum[tag] > 0;
    other = 0;
    do
    :: other < RANKS ->
      if :: other != me && ARRIVED.size == 0 -> complete = 0 :: else fi;
      other++
    :: else -> break
    od;
    other = 0;
#ifndef EARLY_RELEASE
    do
    :: complete && other < RANKS ->
      if :: other != me -> read_front() :: else fi;
      other++
    :: else -> break
    od;
#endif
    if :: complete -> own.to_sum[tag]-- :: else fi;
    if :: own.to_sum[tag] == 0 -> own.adding[tag] = 0 :: else fi;
    other = 0
  }
}

// The sum of `tag`, as far as all ranks' pieces have arrived.
inline add_up() {
  do
  ::
    sum_piece();
    if :: !complete -> break :: else fi;
    do
    :: other < RANKS && other != me ->
#ifdef EARLY_RELEASE
      slot = ARRIVED.pieces[0].slot;
      moved = ARRIVED.pieces[0].moved;
      if :: !moved -> return_slot(other) :: else fi;
      d_step { read_front(); pop_front() }
#else
      d_step { pop_front() }
#ifdef SLOT_RETURNED_TWICE
      moved = 0;
#endif
      if :: !moved -> return_slot(other) :: else fi;
#endif
      other++
    :: other == me -> other++
    :: other == RANKS -> break
    od;
    other = 0
  od;
  moved = 0
}

// Sets in `news` the tags of pieces that have arrived.
inline take_notes() {
  d_step {
    other = 0;
    do
    :: other < RANKS ->
      do
      :: len(notes[PAIR(other, me)]) > 0 ->
        notes[PAIR(other, me)]?tag, slot;
        ARRIVED.pieces[ARRIVED.size].slot = slot;
        ARRIVED.size++;
        own.unmoved[other]++;
        news = news | (1 << tag)
      :: else -> break
      od;
      other++
    :: else -> break
    od;
    other = 0; slot = 0; tag = 0
  }
}

inline look() {
  if
  :: rung[me] ->
#ifdef HEARD_AFTER_NOTES
    take_notes();
    rung[me] = 0;
#else
    rung[me] = 0;
    take_notes();
#endif
    do
    :: news != 0 ->
      d_step {
        tag = 0;
        do :: (news & (1 << tag)) == 0 -> tag++ :: else -> break od;
        news = news & ~(1 << tag)
      }
      if :: own.adding[tag] -> add_up() :: else fi
    :: else -> break
    od;
#ifndef LOOK_WITHOUT_POSTING
    post_what_fits()
#else
    tag = 0
#endif
  :: else
  fi
}

// A piece that cannot be summed yet leaves the slot of a rank that needs one.
inline move_out() {
  do
  :: tag < TAGS && other < RANKS && left < ARRIVED.size ->
    if
    :: activity[other] == kWaitsForSlots && !ARRIVED.pieces[left].moved ->
      slot = ARRIVED.pieces[left].slot;
#ifdef MOVED_AFTER_RELEASE
      return_slot(other);
      ARRIVED.pieces[left].what = content[other * SLOTS + slot];
#else
      ARRIVED.pieces[left].what = content[other * SLOTS + slot];
      return_slot(other);
#endif
      d_step { ARRIVED.pieces[left].moved = 1; own.unmoved[other]-- }
    :: else
    fi;
    left++
  :: tag < TAGS && other < RANKS && left >= ARRIVED.size -> d_step { left = 0; other++ }
  :: tag < TAGS && other == RANKS -> d_step { other = 0; tag++ }
  :: tag == TAGS -> break
  od;
  tag = 0;
  slot = 0
}

inline begin_sum() {
  d_step {
    own.started[which] = 1;
    own.adding[which] = 1;
    own.posted[which] = 0;
    own.to_sum[which] = PIECES;
    other = 0;
    do
    :: other < RANKS ->
      if :: other != me -> own.to_post[SEEN_FROM(which, other)] = PIECES :: else fi;
      other++
    :: else -> break
    od;
    other = 0;
    own.posting[own.n_posting] = which;
    own.n_posting++
  }
}

#define is_done(which) (own.posted[which] && own.to_sum[which] == 0)
#define needs(from) (activity[from] == kWaitsForSlots && own.unmoved[from] > 0)
#if RANKS == 2
#define can_move_out (needs(0) || needs(1))
#else
#define can_move_out (needs(0) || needs(1) || needs(2))
#endif
#if TAGS == 1
#define all_started (own.started[0])
#define none_started (!own.started[0])
#else
#define all_started (own.started[0] && own.started[1])
#define none_started (!own.started[0] && !own.started[1])
#endif

proctype Rank(byte me) {
  byte rounds, which, tag, to, other, owner, slot, what, news, distance = 1, left, i;
  bit moved, complete, begins = 1;
  Own own;
  d_step {
    do :: slot < SLOTS -> own.free[slot] = 1; slot++ :: else -> break od;
    slot = 0;
    do
    :: left < TAGS * RANKS -> own.next_out[left] = 1; own.next_in[left] = 1; left++
    :: else -> break
    od;
    left = 0
  }
  do
  :: rounds < ROUNDS ->
    // What the caller does next: start() of a tag, or finish() once all are started.
    if
    // Rank 0 starts with tag 0, whatever its name.
    :: begins && !own.started[0] -> which = 0
#if TAGS > 1
    :: begins && !own.started[1] && (me != 0 || own.started[0]) -> which = 1
#endif
    :: !begins && own.started[0] -> which = 0
#if TAGS > 1
    :: !begins && own.started[1] -> which = 1
#endif
    fi;
#ifdef ELSEWHERE
    if
    :: me == 0 && !begins && done_ranks < RANKS - 1 ->
#ifndef NO_ATTENDANT
      if :: own.n_posting == 0 -> skip :: else -> activity[me] = kWaitsForSlots fi;
#endif
      do
      :: done_ranks == RANKS - 1 -> break
#ifndef NO_ATTENDANT
      :: rung[me] ->
        BEGIN_STEP
        look();
        if :: own.n_posting == 0 -> activity[me] = kComputes :: else -> activity[me] = kWaitsForSlots fi;
        END_STEP
#ifndef ATTENDANT_ONLY_LOOKS
      :: can_move_out -> move_out()
#endif
#endif
      od
    :: else
    fi;
#endif
    if
    :: begins ->
      BEGIN_STEP
      begin_sum();
      look();
      post_what_fits();
#ifndef START_WITHOUT_ADDING_UP
      tag = which;
      if :: own.adding[tag] -> add_up() :: else fi;
      tag = 0;
#endif
      if :: all_started -> begins = 0 :: else fi;
      END_STEP
    :: else ->
      do
      ::
        BEGIN_STEP
        look();
        if :: is_done(which) -> break :: else fi;
#ifdef NOBODY_SAYS_THAT_IT_NEEDS_SLOTS
        activity[me] = kWaits;
#else
        if :: own.n_posting == 0 -> activity[me] = kWaits :: else -> activity[me] = kWaitsForSlots fi;
#endif
        END_STEP;
        if
        :: rung[me]
#ifndef NO_MOVE_OUT
        :: can_move_out -> move_out()
#endif
        fi
      od;
      skip;
      d_step {
        activity[me] = kComputes;
        own.started[which] = 0;
        if :: none_started -> begins = 1; rounds++ :: else fi;
        which = 0
      }
    fi
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

ltl every_sum_ends { <> (done_ranks == RANKS) }
