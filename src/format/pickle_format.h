#pragma once

// The bytes of the pickle format, for reading and writing.

#include <c10/core/ScalarType.h>

#include <string_view>

namespace shardstep::detail {

constexpr char kPickleProtocol = 2;

namespace op {
constexpr char kProto = '\x80';
constexpr char kStop = '.';
constexpr char kMark = '(';
constexpr char kNone = 'N';
constexpr char kNewTrue = '\x88';
constexpr char kNewFalse = '\x89';
constexpr char kBinInt = 'J';      // int32, little-endian
constexpr char kBinInt1 = 'K';     // uint8
constexpr char kBinInt2 = 'M';     // uint16, little-endian
constexpr char kLong1 = '\x8a';    // uint8 length, two's complement, little-endian
constexpr char kBinFloat = 'G';    // double, big-endian
constexpr char kBinUnicode = 'X';  // uint32 length, UTF-8
constexpr char kEmptyTuple = ')';
constexpr char kTuple = 't';  // of what is above the mark
constexpr char kTuple1 = '\x85';
constexpr char kTuple2 = '\x86';
constexpr char kTuple3 = '\x87';
constexpr char kEmptyList = ']';
constexpr char kAppend = 'a';
constexpr char kAppends = 'e';
constexpr char kEmptyDict = '}';
constexpr char kSetItem = 's';
constexpr char kSetItems = 'u';
constexpr char kGlobal = 'c';  // module and name, each ended by a newline
constexpr char kReduce = 'R';
constexpr char kBuild = 'b';
constexpr char kBinPersId = 'Q';
constexpr char kBinPut = 'q';      // uint8
constexpr char kLongBinPut = 'r';  // uint32
constexpr char kBinGet = 'h';
constexpr char kLongBinGet = 'j';
}  // namespace op

struct StorageType {
  at::ScalarType dtype;
  const char* name;
};
constexpr StorageType kStorageTypes[] = {
    {at::ScalarType::Float, "FloatStorage"},
    {at::ScalarType::Double, "DoubleStorage"},
    {at::ScalarType::Half, "HalfStorage"},
    {at::ScalarType::BFloat16, "BFloat16Storage"},
    {at::ScalarType::Long, "LongStorage"},
    {at::ScalarType::Int, "IntStorage"},
    {at::ScalarType::Short, "ShortStorage"},
    {at::ScalarType::Char, "CharStorage"},
    {at::ScalarType::Byte, "ByteStorage"},
    {at::ScalarType::Bool, "BoolStorage"},
    {at::ScalarType::ComplexFloat, "ComplexFloatStorage"},
    {at::ScalarType::ComplexDouble, "ComplexDoubleStorage"},
};

// Python's name for a storage of `dtype`, or null if it has none.
constexpr const char* storage_type(at::ScalarType dtype) {
  for (const auto& type : kStorageTypes) {
    if (type.dtype == dtype) return type.name;
  }
  return nullptr;
}

}  // namespace shardstep::detail
