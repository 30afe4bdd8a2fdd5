# The kinds of target that exist here: rooms, programs, unit tests, benchmarks, fuzzers.

# kv_room(NAME event [LIBRARY kvevent DESCRIPTION "..."] SOURCES a.c ... [LINK t ...] [STATIC -lx ...])
#
# A static library kv_NAME for use inside the tree and, with LIBRARY, the shared library that users
# link: same objects, `base` folded in and hidden, only what the public header marks is exported.
function(kv_room)
  cmake_parse_arguments(R "" "NAME;LIBRARY;DESCRIPTION" "SOURCES;LINK;STATIC" ${ARGN})
  if(NOT R_SOURCES)
    add_library(kv_${R_NAME} INTERFACE)
    return()
  endif()
  add_library(kv_${R_NAME} STATIC ${R_SOURCES})
  set(root ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/..) # not CMAKE_SOURCE_DIR: src/kvx also builds alone
  target_include_directories(kv_${R_NAME} PUBLIC ${root}/include ${root}/src)
  target_link_libraries(kv_${R_NAME} PUBLIC ${R_LINK} Threads::Threads)
  if(R_LIBRARY)
    kv_library(NAME ${R_LIBRARY} DESCRIPTION "${R_DESCRIPTION}" ROOMS ${R_NAME} STATIC ${R_STATIC})
  endif()
endfunction()

# kv_library(NAME kvbm DESCRIPTION "..." ROOMS bm transfer ... [STATIC -lx ...])
#
# The shared library of some rooms: their objects, linked with what they link; and lib${NAME}.a, one
# object that exports what the shared one does. STATIC names what users of the latter have to link.
function(kv_library)
  cmake_parse_arguments(L "" "NAME;DESCRIPTION" "ROOMS;STATIC" ${ARGN})
  set(root ${CMAKE_CURRENT_FUNCTION_LIST_DIR}/..)
  add_library(${L_NAME} SHARED)
  foreach(room ${L_ROOMS})
    target_sources(${L_NAME} PRIVATE $<TARGET_OBJECTS:kv_${room}>)
    get_target_property(links kv_${room} LINK_LIBRARIES)
    foreach(link ${links})
      string(REGEX REPLACE "^kv_" "" name "${link}")
      if(NOT name IN_LIST L_ROOMS)
        target_link_libraries(${L_NAME} PRIVATE ${link})
      endif()
    endforeach()
  endforeach()
  target_include_directories(${L_NAME} INTERFACE $<INSTALL_INTERFACE:${CMAKE_INSTALL_INCLUDEDIR}>
                             $<BUILD_INTERFACE:${root}/include>)
  target_link_options(${L_NAME} PRIVATE -Wl,--exclude-libs,ALL)
  set_target_properties(${L_NAME} PROPERTIES VERSION ${PROJECT_VERSION} SOVERSION 0)
  set_property(GLOBAL APPEND PROPERTY KV_LIBRARIES ${L_NAME})
  set(PC_NAME ${L_NAME})
  set(PC_DESCRIPTION "${L_DESCRIPTION}")
  kv_archive(${L_NAME} "${L_ROOMS}")
  string(JOIN " " PC_STATIC ${L_STATIC})
  configure_file(${root}/cmake/library.pc.in ${CMAKE_BINARY_DIR}/pkgconfig/${L_NAME}.pc @ONLY)
endfunction()

# kv_archive(kvbm "bm;transfer;..."): libkvbm.a, for which the rooms and all that they use of the tree become one
# object. Only public names stay visible in it, and these are weak: a program
# links several archives although each holds a copy of base. Names that the object lacks stay as they are: no archive
# is searched for a weak one, which would be NULL (__cpu_model of libgcc.a).
function(kv_archive library rooms)
  if(KV_SANITIZE OR KV_FUZZ OR KV_COVERAGE)
    return()
  endif()
  set(objects)
  set(used)
  foreach(room ${rooms})
    list(APPEND objects $<TARGET_OBJECTS:kv_${room}>)
    list(APPEND queue kv_${room})
  endforeach()
  while(queue)
    list(POP_FRONT queue target)
    list(APPEND used ${target})
    get_target_property(links ${target} LINK_LIBRARIES)
    foreach(link ${links})
      if(link MATCHES "^kv_" AND NOT link IN_LIST used AND NOT link IN_LIST queue)
        list(APPEND queue ${link})
      endif()
    endforeach()
  endwhile()
  list(TRANSFORM used REPLACE "(.+)" "$<TARGET_FILE:\\1>" OUTPUT_VARIABLE files)
  set(object ${CMAKE_BINARY_DIR}/archives/${library}.o)
  set(archive ${CMAKE_ARCHIVE_OUTPUT_DIRECTORY}/lib${library}.a)
  add_custom_command(OUTPUT ${archive}
                     COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_BINARY_DIR}/archives
                     COMMAND ${CMAKE_LINKER} -r -o ${object} ${objects} --start-group ${files} --end-group
                     COMMAND ${CMAKE_OBJCOPY} --localize-hidden ${object}
                     COMMAND sh -c "'${CMAKE_NM}' -gP --defined-only '${object}' | cut -d ' ' -f 1 >'${object}.names'"
                     COMMAND ${CMAKE_OBJCOPY} --weaken-symbols=${object}.names ${object}
                     COMMAND ${CMAKE_AR} rcsD ${archive} ${object}
                     DEPENDS ${used} COMMAND_EXPAND_LISTS VERBATIM)
  add_custom_target(${library}-archive ALL DEPENDS ${archive})
  install(FILES ${archive} DESTINATION ${CMAKE_INSTALL_LIBDIR})
endfunction()

# kv_program(NAME kv-indexer SOURCES main.c [LINK t ...])
function(kv_program)
  cmake_parse_arguments(P "" "NAME" "SOURCES;LINK" ${ARGN})
  if(NOT EXISTS ${CMAKE_CURRENT_SOURCE_DIR}/main.c)
    return()
  endif()
  add_executable(${P_NAME} ${P_SOURCES})
  target_link_libraries(${P_NAME} PRIVATE ${P_LINK})
  set_property(GLOBAL APPEND PROPERTY KV_PROGRAMS ${P_NAME})
endfunction()

# Every room's static library; tests, benchmarks and fuzzers may reach into private headers.
add_library(kv_everything INTERFACE)
target_link_libraries(kv_everything INTERFACE kv_selector kv_indexer kv_cli kv_advisor kv_volume kv_manager kv_plan kv_group kv_peer kv_select kv_index kv_llama kv_store kv_plane kv_event kv_kvx kv_base)
if(KV_EXTPROC)
  target_link_libraries(kv_everything INTERFACE kv_extproc kv_grpc)
endif()

# CTest's slots are eighths of a core (ctest -j 16 is for two). A test takes half a core, as most of them wait for disks
# and processes now and then; under the thread sanitizer, ten times slower, a whole one. Those that mostly wait take less
# (tests/CMakeLists.txt).
set(KV_CORE PROCESSORS 4)
if(KV_SANITIZE STREQUAL thread)
  set(KV_CORE PROCESSORS 8)
endif()

# kv_unit(room file.c): one cmocka program per module, run by CTest with a time limit.
function(kv_unit room file)
  get_filename_component(stem ${file} NAME_WE)
  string(REGEX REPLACE "^test_" "" stem ${stem})
  set(target test-${room}-${stem})
  add_executable(${target} ${file})
  target_link_libraries(${target} PRIVATE test-fixed-secret kv_everything PkgConfig::CMOCKA)
  target_include_directories(${target} PRIVATE ${CMAKE_SOURCE_DIR}/tests)
  if(TARGET test-support-${room})
    target_link_libraries(${target} PRIVATE test-support-${room})
  endif()
  file(STRINGS ${file} starved REGEX "^#include \"starve\\.h\"")
  if(starved) # its allocations go through starve.c
    target_sources(${target} PRIVATE ${CMAKE_SOURCE_DIR}/tests/starve.c)
    foreach(name malloc calloc realloc reallocarray strdup posix_memalign mmap)
      target_link_options(${target} PRIVATE -Wl,--wrap=${name})
    endforeach()
  endif()
  set_target_properties(${target} PROPERTIES RUNTIME_OUTPUT_DIRECTORY ${CMAKE_BINARY_DIR}/tests)
  if(KV_SANITIZE STREQUAL thread AND ${room}.${stem} IN_LIST KV_SINGLE_THREADED)
    set_target_properties(${target} PROPERTIES EXCLUDE_FROM_ALL ON)
    return()
  endif()
  add_test(NAME ${room}.${stem} COMMAND ${target})
  set_tests_properties(${room}.${stem} PROPERTIES TIMEOUT 600 LABELS unit ${KV_CORE}
                       ENVIRONMENT "KV_SOURCE_DIR=${CMAKE_SOURCE_DIR};KV_BUILD_DIR=${CMAKE_BINARY_DIR};TSAN_OPTIONS=suppressions=${CMAKE_SOURCE_DIR}/tests/tsan.supp;LSAN_OPTIONS=print_suppressions=0:suppressions=${CMAKE_SOURCE_DIR}/tests/lsan.supp")
  if(NOT KV_SANITIZE AND ${room}.${stem} IN_LIST KV_SINGLE_THREADED)
    set_property(TEST ${room}.${stem} APPEND PROPERTY ENVIRONMENT LD_PRELOAD=${CMAKE_BINARY_DIR}/tests/libno_threads.so)
  endif()
endfunction()

# kv_set_tests("a.b;c.d" PROPERTY value ...): set properties of those tests that this build has.
function(kv_set_tests tests)
  foreach(test ${tests})
    if(TEST ${test})
      set_tests_properties(${test} PROPERTIES ${ARGN})
    endif()
  endforeach()
endfunction()

# kv_script_test(kind file): an end-to-end or fault test, a program of its own (exit 77 = skipped).
function(kv_script_test kind file)
  get_filename_component(stem ${file} NAME_WE)
  string(REGEX REPLACE "^test_" "" stem ${stem})
  if(file MATCHES "\\.py$")
    set(command /usr/bin/python3 -B ${file})
  else()
    set(command bash ${file})
  endif()
  add_test(NAME ${kind}.${stem} COMMAND ${command})
  set_tests_properties(${kind}.${stem} PROPERTIES TIMEOUT 600 LABELS ${kind} ${KV_CORE} SKIP_RETURN_CODE 77
                       ENVIRONMENT "KV_SOURCE_DIR=${CMAKE_SOURCE_DIR};KV_BUILD_DIR=${CMAKE_BINARY_DIR};KV_SANITIZE=${KV_SANITIZE};TSAN_OPTIONS=suppressions=${CMAKE_SOURCE_DIR}/tests/tsan.supp;LSAN_OPTIONS=print_suppressions=0:suppressions=${CMAKE_SOURCE_DIR}/tests/lsan.supp")
endfunction()

# kv_plugin(NAME redis SOURCES a.c ... [LINK t ...])
#
# libkv_store_NAME.so, to be found by dlopen, and a static library kv_plugin_NAME for unit tests that
# reach into it (tests/plugins/NAME).
function(kv_plugin)
  cmake_parse_arguments(P "" "NAME" "SOURCES;LINK" ${ARGN})
  add_library(kv_plugin_${P_NAME} STATIC ${P_SOURCES})
  target_include_directories(kv_plugin_${P_NAME} PUBLIC ${CMAKE_SOURCE_DIR}/include ${CMAKE_SOURCE_DIR}/src
                             ${CMAKE_SOURCE_DIR}/plugins)
  target_link_libraries(kv_plugin_${P_NAME} PUBLIC kv_base ${P_LINK})
  add_library(kv_store_${P_NAME} MODULE $<TARGET_OBJECTS:kv_plugin_${P_NAME}>)
  target_link_libraries(kv_store_${P_NAME} PRIVATE kv_base ${P_LINK})
  target_link_options(kv_store_${P_NAME} PRIVATE
                      -Wl,--version-script=${CMAKE_SOURCE_DIR}/plugins/exports.map -Wl,--exclude-libs,ALL
                      -Wl,-z,nodelete) # a thread that waits for a name server can't be stopped, so its code stays loaded
  if(NOT KV_SANITIZE) # whose own symbols come from the program
    target_link_options(kv_store_${P_NAME} PRIVATE -Wl,-z,defs) # a source left out fails here, not in dlopen
  endif()
  set_target_properties(kv_store_${P_NAME} PROPERTIES PREFIX lib)
  install(TARGETS kv_store_${P_NAME} LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
endfunction()
