# make install [DESTDIR=] and make uninstall: programs, libraries, headers, pkg-config, CMake package.
include(CMakePackageConfigHelpers)

get_property(libraries GLOBAL PROPERTY KV_LIBRARIES)
get_property(programs GLOBAL PROPERTY KV_PROGRAMS)

if(NOT libraries OR NOT programs)
  return()
endif()

install(TARGETS ${programs} RUNTIME DESTINATION ${CMAKE_INSTALL_BINDIR})
install(TARGETS ${libraries} EXPORT kvasir LIBRARY DESTINATION ${CMAKE_INSTALL_LIBDIR})
foreach(section 1 5)
  file(GLOB pages ${CMAKE_SOURCE_DIR}/docs/man/*.${section})
  install(FILES ${pages} DESTINATION ${CMAKE_INSTALL_MANDIR}/man${section})
endforeach()
# The other pages come from the programs' own option tables.
set(store_pages save restore ls show verify gc pack rm stats bench conformance)
list(TRANSFORM store_pages PREPEND "kvasir store ")
set(peer_pages share look lease read)
list(TRANSFORM peer_pages PREPEND "kvasir peer ")
set(events_pages tail stat replay)
list(TRANSFORM events_pages PREPEND "kvasir events ")
foreach(command "kv-indexer" "kv-selector" "kv-advisor" "kvasir advise" "kvasir advisor plan" "kvasir doctor" "kvasir replay" "kvasir select replay" "kvasir top" "kvasir bench tiers" "kvasir bench peers" "kvasir bench tiered" ${peer_pages} ${events_pages} ${store_pages})
  string(REPLACE " " "-" page "${command}")
  string(REPLACE " " ";" words "${command}")
  list(POP_FRONT words program)
  add_custom_command(OUTPUT ${CMAKE_BINARY_DIR}/man/${page}.1
                     COMMAND ${CMAKE_COMMAND} -E make_directory ${CMAKE_BINARY_DIR}/man
                     COMMAND $<TARGET_FILE:${program}> ${words} --help-man >${CMAKE_BINARY_DIR}/man/${page}.1
                     DEPENDS ${program})
  list(APPEND made_pages ${CMAKE_BINARY_DIR}/man/${page}.1)
endforeach()
add_custom_target(man ALL DEPENDS ${made_pages})
install(FILES ${made_pages} DESTINATION ${CMAKE_INSTALL_MANDIR}/man1)
set(completions ${CMAKE_SOURCE_DIR}/deploy/completions)
install(FILES ${completions}/kvasir.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME kvasir)
install(FILES ${completions}/kvasir.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME kv-indexer)
install(FILES ${completions}/kvasir.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME kv-advisor)
install(FILES ${completions}/kvasir.bash DESTINATION ${CMAKE_INSTALL_DATADIR}/bash-completion/completions RENAME kv-selector)
install(FILES ${completions}/_kvasir DESTINATION ${CMAKE_INSTALL_DATADIR}/zsh/site-functions)
install(FILES ${KV_PUBLIC_HEADERS} DESTINATION ${CMAKE_INSTALL_INCLUDEDIR})
install(DIRECTORY ${CMAKE_BINARY_DIR}/pkgconfig/ DESTINATION ${CMAKE_INSTALL_LIBDIR}/pkgconfig)
# The .pc files name the prefix of the configuration; `make install PREFIX=` chooses another one later.
install(CODE "file(GLOB pcs \"\$ENV{DESTDIR}\${CMAKE_INSTALL_PREFIX}/${CMAKE_INSTALL_LIBDIR}/pkgconfig/kv*.pc\")
  foreach(pc \${pcs})
    file(READ \"\${pc}\" text)
    string(REGEX REPLACE \"^prefix=[^\n]*\" \"prefix=\${CMAKE_INSTALL_PREFIX}\" text \"\${text}\")
    file(WRITE \"\${pc}\" \"\${text}\")
  endforeach()")
install(EXPORT kvasir NAMESPACE kvasir:: FILE kvasir-targets.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/kvasir)
file(WRITE ${CMAKE_BINARY_DIR}/kvasir-config.cmake
     "include(\"\${CMAKE_CURRENT_LIST_DIR}/kvasir-targets.cmake\")\n")
write_basic_package_version_file(${CMAKE_BINARY_DIR}/kvasir-config-version.cmake
                                 COMPATIBILITY SameMinorVersion)
install(FILES ${CMAKE_BINARY_DIR}/kvasir-config.cmake ${CMAKE_BINARY_DIR}/kvasir-config-version.cmake
        DESTINATION ${CMAKE_INSTALL_LIBDIR}/cmake/kvasir)

# Debian's packaging separates debug information and runs ldconfig by itself.
option(KV_SEPARATE_DEBUG "install stripped binaries, their debug information in .debug/ beside them" ON)
configure_file(${CMAKE_CURRENT_LIST_DIR}/after-install.cmake.in ${CMAKE_BINARY_DIR}/after-install.cmake @ONLY)
install(SCRIPT ${CMAKE_BINARY_DIR}/after-install.cmake)

add_custom_target(uninstall COMMAND ${CMAKE_COMMAND} -DMANIFEST=${CMAKE_BINARY_DIR}/install_manifest.txt
                  -P ${CMAKE_SOURCE_DIR}/cmake/uninstall.cmake)
