// How a save becomes the checkpoint of a directory: SaveJob (src/checkpoint/save_job.cpp),
// commit_index and open_index (src/checkpoint/checkpoint_files.cpp), ReplacingFile
// (src/format/replacing_file.cpp), DirectoryLock (src/checkpoint/directory_lock.cpp).
//
// JOBS jobs of RANKS ranks save to one directory, which holds checkpoint 1 unless FIRST is defined.
// A reader opens the directory and reads. With DEATH, one process may be killed at any step. With
// CRASH, the machine may fail at any step: of the names that were changed since the directory was
// last synced, each is changed or not, and files that were not synced are torn. Whatever happened,
// another job then saves, and leaves its own files alone.
//
// A call of the system is one step. Abstracted: the bytes, messages between ranks (a flag, or that
// the other is dead), errors of the disk other than FAILS; temporary names, which nobody reads.
//
// run: 1 rank, a save, a reader, the machine fails anywhere | -DRANKS=1 -DJOBS=1 -DCRASH | safety
// run: 2 ranks in the background, a reader, the machine fails anywhere | -DRANKS=2 -DJOBS=1 -DCRASH | safety
// run: 2 ranks that wait, a reader, the machine fails anywhere | -DRANKS=2 -DJOBS=1 -DCRASH -DBLOCKING | safety
// run: 2 ranks, the first save, the machine fails anywhere | -DRANKS=2 -DJOBS=1 -DCRASH -DFIRST | safety
// run: 3 ranks in the background, the machine fails anywhere | -DRANKS=3 -DJOBS=1 -DCRASH -DREADERS=0 | safety
// run: 2 ranks, a reader, one is killed anywhere | -DRANKS=2 -DJOBS=1 -DDEATH | safety
// run: 3 ranks, a reader, one is killed anywhere | -DRANKS=3 -DJOBS=1 -DDEATH | safety
// run: 2 ranks, a reader, the disk fails, one is killed anywhere | -DRANKS=2 -DJOBS=1 -DDEATH -DFAILS | safety
// run: 2 ranks, the disk fails, then the machine | -DRANKS=2 -DJOBS=1 -DCRASH -DFAILS -DREADERS=0 | safety
// run: 2 jobs of 2 ranks, a reader | -DRANKS=2 -DJOBS=2 | safety
// run: 2 jobs of 2 ranks, one is killed anywhere | -DRANKS=2 -DJOBS=2 -DDEATH -DREADERS=0 | safety
// run: 2 jobs of 1 rank, a reader, the machine fails anywhere | -DRANKS=1 -DJOBS=2 -DCRASH | safety
// run: 2 jobs of 1 rank, a reader, one is killed anywhere | -DRANKS=1 -DJOBS=2 -DDEATH | safety
// run: a job of 1 rank, 2 readers, one is killed anywhere | -DRANKS=1 -DJOBS=1 -DREADERS=2 -DDEATH | safety
// run: 3 jobs of 1 rank, one is killed anywhere | -DRANKS=1 -DJOBS=3 -DREADERS=0 -DDEATH | safety
// mutation: INDEX_BEFORE_SHARD | -DRANKS=2 -DJOBS=1 | safety | written[
// mutation: SHARD_NOT_SYNCED | -DRANKS=1 -DJOBS=1 -DCRASH -DREADERS=0 | safety | written[
// mutation: INDEX_NOT_SYNCED | -DRANKS=1 -DJOBS=1 -DCRASH -DREADERS=0 | safety | index_synced[index]
// mutation: NAMES_NOT_SYNCED_BEFORE_INDEX | -DRANKS=2 -DJOBS=1 -DCRASH -DREADERS=0 | safety | written[
// mutation: NAMES_NOT_SYNCED_AFTER_INDEX | -DRANKS=1 -DJOBS=1 -DCRASH -DREADERS=0 | safety | assertion violated
// mutation: REMOVED_BEFORE_INDEX | -DRANKS=1 -DJOBS=1 -DREADERS=0 -DCRASH | safety | written[
// mutation: NO_SECOND_NAME | -DRANKS=1 -DJOBS=1 | safety | written[
// mutation: READER_WITHOUT_LOCK | -DRANKS=1 -DJOBS=1 | safety | written[
// mutation: READER_WITHOUT_SECOND_LOOK | -DRANKS=1 -DJOBS=1 | safety | written[
// mutation: RETIRED_WITHOUT_LOCK | -DRANKS=1 -DJOBS=1 | safety | written[
// mutation: NO_WRITER_LOCK | -DRANKS=2 -DJOBS=2 -DREADERS=0 | safety | invalid end state
// mutation: LOCK_RELEASED_BEFORE_INDEX | -DRANKS=1 -DJOBS=2 -DREADERS=0 | safety | invalid end state
// mutation: LOCK_WITHOUT_SECOND_LOOK | -DRANKS=1 -DJOBS=3 -DREADERS=0 | safety | writers<=1
// mutation: UNLOCKED_BEFORE_UNLINK | -DRANKS=1 -DJOBS=3 -DREADERS=0 | safety | writers<=1
// mutation: SHARD_REMOVED_WHEN_UNSURE | -DRANKS=2 -DJOBS=1 -DDEATH | safety | written[
// mutation: SHARD_REMOVED_THOUGH_NAMED | -DRANKS=2 -DJOBS=1 -DFAILS | safety | written[
// mutation: SHARD_REMOVED_BEFORE_RANK_0_STOPPED | -DRANKS=2 -DJOBS=1 -DFAILS | safety | assertion violated
// mutation: LOCK_OUTLIVES_ITS_PROCESS | -DRANKS=1 -DJOBS=1 -DDEATH -DREADERS=0 | safety | refused[

#ifndef READERS
#define READERS 1
#endif
// Ids: 0 is none, 1 what was there before, then a job each, then the job that comes at the end.
#define LAST (JOBS + 2)
#define IDS (LAST + 1)
#define OF(id, rank) ((id) * RANKS + (rank))
#define INODES (JOBS + 4)

// The directory as processes see it, and as it is on the disk.
byte index, index_on_disk;  // what index.json holds
bit previous[IDS], previous_on_disk[IDS];  // index-<id>.json
bit shard[IDS * RANKS], shard_on_disk[IDS * RANKS];  // shard-<id>-<rank>.safetensors
// Contents: written, and synced.
bit written[IDS * RANKS], synced[IDS * RANKS];
bit index_synced[IDS];
byte order[IDS];  // when an index was put in place: 1, 2, ...
byte placed = 0;
byte completed = 0;  // the id of the last save that has returned
// Locks, which vanish with their process: on indexes, and on writer.lock.
byte readers[IDS];
bit retiring[IDS];
byte lock_path = 0;  // the inode that writer.lock names
byte inodes = 0;
bit held[INODES];
byte writers = 0;
// Between the ranks of a job.
bit started[IDS], refused[IDS], shard_failed[IDS], no_index[IDS], done[IDS];
byte reported[IDS];

byte life = 0;  // of the machine
bit dead[IDS * RANKS];
bit failed = 0;
byte ended = 0;  // processes of the first life, and the dead

#define is_whole(id, rank) (shard[OF(id, rank)] && written[OF(id, rank)])

inline check_whole(id) {
  i = 0;
  do
  :: i < RANKS -> assert(is_whole(id, i)); i++
  :: else -> i = 0; break
  od
}

inline sync_directory() {
  skip;  // no jump may end in a d_step
  d_step {
    index_on_disk = index;
    i = 0;
    do :: i < IDS -> previous_on_disk[i] = previous[i]; i++ :: else -> break od;
    i = 0;
    do :: i < IDS * RANKS -> shard_on_disk[i] = shard[i]; i++ :: else -> i = 0; break od
  }
}

// DirectoryLock.
inline take_lock() {
  do
  ::
    atomic {
      if :: lock_path == 0 -> inodes++; lock_path = inodes :: else fi;
      inode = lock_path
    }
#ifdef NO_WRITER_LOCK
    break;
#endif
    atomic {
      if
      :: held[inode] -> inode = 0; refused[id] = 1; goto out
      :: else -> held[inode] = 1; locked = 1
      fi
    }
#ifdef LOCK_WITHOUT_SECOND_LOOK
    atomic { writers++; counted = 1; assert(writers <= 1); break }
#else
    atomic {
      if
      :: lock_path == inode -> writers++; counted = 1; assert(writers <= 1); break
      :: else -> held[inode] = 0; locked = 0; inode = 0
      fi
    }
#endif
  od
}

inline release_lock() {
  if
  :: inode != 0 ->
#ifdef NO_WRITER_LOCK
    inode = 0
#elif defined(UNLOCKED_BEFORE_UNLINK)
    atomic { writers--; counted = 0; held[inode] = 0; locked = 0; inode = 0 };
    lock_path = 0
#else
    // From here on it writes nothing more.
    atomic { writers--; counted = 0; lock_path = 0 };
    atomic { held[inode] = 0; locked = 0; inode = 0 }
#endif
  :: else
  fi
}

// ShardWriter and ReplacingFile::commit.
inline write_shard() {
  written[OF(id, rank)] = 1;
#ifndef SHARD_NOT_SYNCED
  synced[OF(id, rank)] = 1;
#endif
  shard[OF(id, rank)] = 1;
#ifdef FAILS
  // The directory cannot be synced: the shard has its name, and the others hear of an error.
  if
  :: atomic { rank != 0 && !failed -> failed = 1; shard_failed[id] = 1; goto shard_is_there }
  :: skip
  fi;
#endif
  sync_directory();
shard_is_there:
  skip
}

// The names of this moment, then the indexes that nobody reads, then the shards of all but those.
inline remove_leftovers() {
  skip;
  d_step {
    i = 0;
    do :: i < IDS -> old[i] = previous[i]; kept[i] = (i == id); i++ :: else -> break od;
    i = 0;
    do :: i < IDS * RANKS -> there[i] = shard[i]; i++ :: else -> i = 0; break od
  }
  other = 1;
  do
  :: other < IDS ->
    if
    :: old[other] && other != id ->
      // retire()
#ifdef RETIRED_WITHOUT_LOCK
      previous[other] = 0
#else
      atomic {
        if
        :: readers[other] > 0 -> kept[other] = 1
        :: else -> retiring[other] = 1
        fi
      }
      if
      :: retiring[other] -> previous[other] = 0; retiring[other] = 0
      :: else
      fi
#endif
    :: else
    fi;
    other++
  :: else -> break
  od;
  other = 0;
  do
  :: other < IDS * RANKS ->
    if
    :: there[other] && !kept[other / RANKS] -> shard[other] = 0
    :: else
    fi;
    other++
  :: else -> other = 0; break
  od;
  skip;
  d_step {
    i = 0;
    do :: i < IDS -> old[i] = 0; kept[i] = 0; i++ :: else -> break od;
    i = 0;
    do :: i < IDS * RANKS -> there[i] = 0; i++ :: else -> i = 0; break od
  }
}

inline put_index_in_place() {
#ifndef INDEX_NOT_SYNCED
  index_synced[id] = 1;
#endif
#ifndef NO_SECOND_NAME
  atomic { if :: index != 0 -> previous[index] = 1 :: else fi }
#endif
  d_step { index = id; placed++; order[id] = placed }
}

inline commit_index() {
  // merge_shard() of each; what is not there is an error.
  other = 0;
  do
  :: other < RANKS ->
#ifndef INDEX_BEFORE_SHARD
    if :: is_whole(id, other) -> skip :: else -> assert(false) fi;
#endif
    other++
  :: else -> other = 0; break
  od;
#ifndef NAMES_NOT_SYNCED_BEFORE_INDEX
  sync_directory();
#endif
#ifdef REMOVED_BEFORE_INDEX
  remove_leftovers();
#endif
#ifdef LOCK_RELEASED_BEFORE_INDEX
  release_lock();
#endif
  put_index_in_place();
#ifdef FAILS
  // The directory cannot be synced: there is an index, and the ranks hear of an error.
  if
  :: atomic { !failed -> failed = 1; no_index[id] = 1; goto no_checkpoint }
  :: skip
  fi;
#endif
#ifndef NAMES_NOT_SYNCED_AFTER_INDEX
  sync_directory();
#endif
  remove_leftovers()
}

#define someone_died (dead[OF(id, 0)] || (RANKS > 1 && dead[OF(id, 1 % RANKS)]) || \
                      (RANKS > 2 && dead[OF(id, 2 % RANKS)]))

// Checkpointer::save and wait, on one rank.
proctype Rank(byte id; byte rank; byte born) {
  byte inode, i, other;
  bit locked, counted;
  bit old[IDS], kept[IDS], there[IDS * RANKS];
  {
    if
    :: rank == 0 -> take_lock(); started[id] = 1
    :: else -> (started[id] || refused[id] || someone_died)
    fi;
    if :: !started[id] -> goto out :: else fi;
#ifdef FAILS
    if
    :: atomic { rank == 0 && !failed -> failed = 1; no_index[id] = 1; goto no_checkpoint }
    :: skip
    fi;
#endif
    write_shard();
    atomic { reported[id]++ };
    if
    :: rank == 0 ->
      // wait_for_shards(), or all ranks' reports.
#ifndef INDEX_BEFORE_SHARD
      other = 0;
      do
      :: other < RANKS ->
        if
#ifdef BLOCKING
        :: reported[id] == RANKS && !shard_failed[id] -> other = RANKS
#else
        :: shard[OF(id, other)] -> other++
#endif
        :: someone_died -> goto unsure
        // cancel(): it ends here, or after it has put the index in place.
        :: shard_failed[id] -> no_index[id] = 1; goto no_checkpoint
        fi
      :: else -> other = 0; break
      od;
#endif
      commit_index();
      atomic { completed = id; done[id] = 1 };
      goto finished
    :: else ->
      // first_failure() and has_no_index(): what rank 0 says, if every rank can say something.
      if
#ifdef SHARD_REMOVED_BEFORE_RANK_0_STOPPED
      :: shard_failed[id] -> goto no_checkpoint
#endif
      :: done[id] -> goto finished
      :: no_index[id] -> goto no_checkpoint
      :: someone_died && !done[id] && !no_index[id] -> goto unsure
      fi
    fi;
no_checkpoint:
    // remove_shard(): rank 0 has stopped; the index may be in place all the same.
#ifdef SHARD_REMOVED_THOUGH_NAMED
    shard[OF(id, rank)] = 0;
#else
    if :: index != id -> shard[OF(id, rank)] = 0 :: else fi;
#endif
    goto finished;
unsure:
    // cancel(): the index may come to be, or be there.
#ifdef SHARD_REMOVED_WHEN_UNSURE
    shard[OF(id, rank)] = 0;
#endif
    skip;
finished:
    release_lock();
out:
    skip
  } unless {
    atomic {
      born != life || dead[OF(id, rank)] ->
      // Locks end with the process.
      if
      :: born == life && locked ->
#ifndef LOCK_OUTLIVES_ITS_PROCESS
        held[inode] = 0;
#endif
        if :: counted -> writers-- :: else fi
      :: else
      fi
    }
  };
  ended++
}

// Checkpoint's constructor and reads.
proctype Reader(byte born) {
  byte seen, i;
  {
    skip;
again:
    atomic {
      seen = index;
      if
      :: seen == 0 -> assert(completed == 0); goto closed
      :: else
      fi
    }
#ifndef READER_WITHOUT_LOCK
    atomic {
      if
      :: retiring[seen] -> goto again
      :: else -> readers[seen]++
      fi
    }
#endif
#ifndef READER_WITHOUT_SECOND_LOOK
    if
    :: index != seen ->
#ifndef READER_WITHOUT_LOCK
      readers[seen]--;
#endif
      goto again
    :: else
    fi;
#endif
    do
    :: i < RANKS -> assert(is_whole(seen, i)); i++
    :: else -> i = 0; break
    od;
#ifndef READER_WITHOUT_LOCK
    readers[seen]--;
#endif
closed:
    skip
  } unless { born != life };
  ended++
}

#define PROCESSES (JOBS * RANKS + READERS)

// What the disk holds after the machine has failed.
inline fail_machine() {
  life++;
  i = 0;
  do
  :: i < IDS * RANKS ->
    if :: shard[i] != shard_on_disk[i] -> shard[i] = shard_on_disk[i] :: skip fi;
    if :: !synced[i] -> written[i] = 0 :: else fi;
    i++
  :: else -> break
  od;
  i = 0;
  do
  :: i < IDS ->
    if :: previous[i] != previous_on_disk[i] -> previous[i] = previous_on_disk[i] :: skip fi;
    readers[i] = 0;
    retiring[i] = 0;
    i++
  :: else -> break
  od;
  if :: index != index_on_disk -> index = index_on_disk :: skip fi;
  i = 0;
  do :: i < INODES -> held[i] = 0; i++ :: else -> i = 0; break od;
  writers = 0
}

init {
  byte i, r;
  atomic {
#ifndef FIRST
    index = 1; index_on_disk = 1; index_synced[1] = 1; placed = 1; order[1] = 1; completed = 1;
    do
    :: i < RANKS ->
      shard[OF(1, i)] = 1; shard_on_disk[OF(1, i)] = 1;
      written[OF(1, i)] = 1; synced[OF(1, i)] = 1;
      i++
    :: else -> break
    od;
#endif
    i = 0;
    do
    :: i < JOBS ->
      r = 0;
      do :: r < RANKS -> run Rank(i + 2, r, 0); r++ :: else -> break od;
      i++
    :: else -> break
    od;
    i = 0;
    do :: i < READERS -> run Reader(0); i++ :: else -> i = 0; r = 0; break od
  }
#ifdef DEATH
  if
  :: atomic {
       ended < PROCESSES;
       // Any rank of any job.
       i = 2 * RANKS;
       do :: i < (JOBS + 2) * RANKS - 1 -> i++ :: break od;
       dead[i] = 1;
       i = 0
     }
  :: skip
  fi;
#endif
#ifdef CRASH
  if :: atomic { ended < PROCESSES -> fail_machine() } :: skip fi;
#endif
  (ended == PROCESSES);
  atomic {
    // Whatever happened: the old checkpoint or a new one, whole, and not older than what returned.
    if
    :: index == 0 -> assert(completed == 0)
    :: else ->
      check_whole(index);
      assert(index_synced[index]);
      assert(order[index] >= order[completed])
    fi
  }
  atomic { r = 0; do :: r < RANKS -> run Rank(LAST, r, life); r++ :: else -> break od }
  (ended == PROCESSES + RANKS);
  atomic {
    assert(!refused[LAST]);
    assert(no_index[LAST] || (index == LAST && done[LAST]));
    if :: index == 0 -> skip :: else -> check_whole(index) fi;
    // Nothing is left of the others.
    i = 0;
    do
    :: i < IDS && no_index[LAST] == 0 ->
      assert(i == LAST || !previous[i]);
      i++
    :: else -> break
    od;
    i = 0;
    do
    :: i < LAST * RANKS && no_index[LAST] == 0 -> assert(!shard[i]); i++
    :: else -> break
    od
  }
}
