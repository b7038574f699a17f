#pragma once

// Opens the zip files that torch.save writes, with torch's reader. That reader allocates what the
// file's directory says about a record before it reads the record, for some records already in its
// constructor; so the directory, and where it is said to be, are checked on their way to the
// reader.

#include <caffe2/serialize/inline_container.h>

#include <memory>
#include <string>

namespace shardstep::detail {

// Throws ValueError unless it is a zip file of which no record is larger than the file, and no
// record with contents is one that the reader may leave unread.
std::unique_ptr<caffe2::serialize::PyTorchStreamReader> open_zip(const std::string& path);

}  // namespace shardstep::detail
