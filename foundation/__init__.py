"""What all packages share, and what imports none of them.

allocator    memory that is freed is kept for what comes next
arguments    what callers hand over, checked where it comes in
background   what threads do that nobody waits for: what fails there ends nothing
command_line the entry point of the command, which loads the command line and runs it
deadlines    until when a call may take, however many others it makes on its way
durations    how long, as people write it
errors       what can go wrong, split by what the caller does next
failpoints   named places at which a test can stop, fail or kill the process
forks        what must not be touched in a process that was forked from one that used it
formats      tables of versions, by which whatever is stored or sent is read
gatherer     calls that come while one is under way wait for it, and then go together, as one
ids          names of things that all packages speak of: buckets, and the tokens of batches
open_files   how many files this process may have open
parallel     the same call for many items, on a pool of threads
stop_signals SIGTERM and SIGINT as something to wait for, in whichever thread they arrive
suggestions  the nearest known name, for errors about an unknown one
versions     which versions of what are installed here
"""
