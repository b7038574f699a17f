#pragma once

// Starts the ranks of a program that no launcher started: copies of itself with the environment
// that torchrun would have given them. Single-threaded: call it before torch makes threads.

namespace gpt {

// Whether torchrun, mpirun, srun or launch_ranks started this process.
bool started_by_launcher();

// Runs `ranks` copies of this program and waits for them. SIGINT and SIGTERM go on to them. When
// one fails the others are killed. Returns the exit code for main: 0 if every rank returned 0.
int launch_ranks(int ranks, char** argv);

}  // namespace gpt
